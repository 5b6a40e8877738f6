// A GPT-2 in C that trains: loops over flat buffers, a backward pass by hand, AdamW. Needs a C compiler and nothing else.
//
//   loop_steps RUN.bin OUT_FOLDER FAULTS
//
// RUN.bin: int32 V P C L NH F B T steps parts; float64 rate, betas, decay, clip; float32 wte, wpe, each kind of tensor of a block
// over all blocks, matrices [in, out], the final norm; int32 ids and next ids (steps, B, T). FAULTS: words, "" for none.
// OUT_FOLDER gets .npy files: a tensor for each kind, over the blocks.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { WTE, WPE, LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, OUTW, OUTB, LNFW, LNFB, N };
static int V, P, C, L, NH, F, B, T, R;
static int rows[N], columns[N], blocks[N];
static float *w[N], *g[N], *m[N], *v[N];
static const char *line, *folder;

typedef struct {
    float *x, *z1, *s1, *y1, *qkv, *att, *mix, *mid, *z2, *s2, *y2, *up, *act;
} Layer;

static int has(const char *word) {
    size_t n = strlen(word);
    for (const char *at = line; (at = strstr(at, word)); at += n)
        if ((at == line || at[-1] == ' ') && (at[n] == ' ' || !at[n])) return 1;
    return 0;
}

static float *zeros(size_t n) {
    float *p = calloc(n, sizeof(float));
    if (!p) exit(3);
    return p;
}

static size_t size(int k) { return (size_t)blocks[k] * rows[k] * columns[k]; }
static float *of(float **set, int k, int l) { return set[k] + (size_t)l * rows[k] * columns[k]; }

static void dump(const char *what, int step, int k, const float *x, size_t n) {
    char path[4096], shape[64], header[128];
    if (k < 0) sprintf(shape, "(1,)");
    else if (columns[k] > 1 && blocks[k] > 1) sprintf(shape, "(%d, %d, %d)", blocks[k], rows[k], columns[k]);
    else sprintf(shape, "(%d, %d)", blocks[k] > 1 ? blocks[k] : rows[k], blocks[k] > 1 ? rows[k] : columns[k]);
    snprintf(path, sizeof path, "%s/%s.%d.%02d.npy", folder, what, step, k < 0 ? 99 : k);
    snprintf(header, sizeof header, "{'descr': '<f4', 'fortran_order': False, 'shape': %s}", shape);
    FILE *file = fopen(path, "wb");
    if (!file) exit(4);
    fprintf(file, "\x93NUMPY\x01%c\x76%c%-117s\n", 0, 0, header);
    fwrite(x, sizeof(float), n, file);
    fclose(file);
}

static void dump_all(const char *what, int step, float **set) {
    for (int k = 0; k < N; k++) dump(what, step, k, set[k], size(k));
}

static void norm(float *y, float *z, float *s, const float *x, const float *gain, const float *bias) {
    for (int i = 0; i < R; i++) {
        float mean = 0, var = 0;
        for (int c = 0; c < C; c++) mean += x[i * C + c] / C;
        for (int c = 0; c < C; c++) var += (x[i * C + c] - mean) * (x[i * C + c] - mean) / C;
        s[i] = 1 / sqrtf(var + 1e-5f);
        for (int c = 0; c < C; c++) {
            z[i * C + c] = (x[i * C + c] - mean) * s[i];
            y[i * C + c] = z[i * C + c] * gain[c] + bias[c];
        }
    }
}

static void norm_back(float *dx, float *dgain, float *dbias, const float *d, const float *z, const float *s, const float *gain) {
    for (int i = 0; i < R; i++) {
        float mean = 0, along = 0;
        for (int c = 0; c < C; c++) {
            mean += d[i * C + c] * gain[c] / C;
            along += d[i * C + c] * gain[c] * z[i * C + c] / C;
            dgain[c] += d[i * C + c] * z[i * C + c];
            dbias[c] += d[i * C + c];
        }
        if (has("norm-derivative")) along = 0;
        for (int c = 0; c < C; c++) dx[i * C + c] += s[i] * (d[i * C + c] * gain[c] - mean - z[i * C + c] * along);
    }
}

static void linear(float *y, const float *x, const float *a, const float *bias, int from, int to) {
    for (int i = 0; i < R; i++)
        for (int o = 0; o < to; o++) {
            float sum = bias[o];
            for (int c = 0; c < from; c++) sum += x[i * from + c] * a[c * to + o];
            y[i * to + o] = sum;
        }
}

static void linear_back(float *dx, int k, int l, const float *d, const float *x, int from, int to) {
    const float *a = of(w, k, l);
    float *da = of(g, k, l), *db = of(g, k + 1, l);
    for (int i = 0; i < R; i++)
        for (int o = 0; o < to; o++) {
            float e = d[i * to + o];
            if (!(k == QKVW && has("bias-without-gradient"))) db[o] += e;
            for (int c = 0; c < from; c++) {
                dx[i * from + c] += e * a[c * to + o];
                da[c * to + o] += e * x[i * from + c];
            }
        }
}

static void attention(const Layer *k) {
    int K = C / NH;
    for (int row = 0; row < R * NH; row++) {
        int b = row / (NH * T), h = row / T % NH, t = row % T;
        const float *q = k->qkv + (b * T + t) * 3 * C + h * K;
        float *p = k->att + (size_t)row * T, top = -INFINITY, sum = 0;
        for (int s = 0; s <= t; s++) {
            const float *key = k->qkv + (b * T + s) * 3 * C + C + h * K;
            p[s] = 0;
            for (int i = 0; i < K; i++) p[s] += q[i] * key[i] / sqrtf(K);
            if (p[s] > top) top = p[s];
        }
        for (int s = 0; s <= t; s++) sum += p[s] = expf(p[s] - top);
        for (int s = 0; s <= t; s++) p[s] /= sum;
        for (int i = 0; i < K; i++) {
            float y = 0;
            for (int s = 0; s <= t; s++) y += p[s] * k->qkv[(b * T + s) * 3 * C + 2 * C + h * K + i];
            k->mix[(b * T + t) * C + h * K + i] = y;
        }
    }
}

static void attention_back(float *dqkv, const float *d, const Layer *k) {
    int K = C / NH;
    float *dp = zeros(T), scale = has("scale-lost-backward") ? 1 : 1 / sqrtf(K);
    for (int row = 0; row < R * NH; row++) {
        int b = row / (NH * T), h = row / T % NH, t = row % T;
        const float *p = k->att + (size_t)row * T, *e = d + (b * T + t) * C + h * K;
        float sum = 0;
        for (int s = 0; s <= t; s++) {
            size_t value = (b * T + s) * 3 * C + 2 * C + h * K;
            dp[s] = 0;
            for (int i = 0; i < K; i++) dp[s] += e[i] * k->qkv[value + i], dqkv[value + i] += p[s] * e[i];
            sum += p[s] * dp[s];
        }
        for (int s = 0; s <= t; s++) {
            float ds = p[s] * (dp[s] - sum) * scale;
            size_t q = (b * T + t) * 3 * C + h * K, key = (b * T + s) * 3 * C + C + h * K;
            for (int i = 0; i < K; i++) dqkv[q + i] += ds * k->qkv[key + i], dqkv[key + i] += ds * k->qkv[q + i];
        }
    }
    free(dp);
}

static float tanh_of(float x) { return tanhf(sqrtf(2 / (float)M_PI) * (x + 0.044715f * x * x * x)); }

static Layer forward_block(const float *x, float *out, int l) {
    size_t n = (size_t)R * C;
    Layer k = {zeros(n), zeros(n), zeros(R), zeros(n), zeros(3 * n), zeros((size_t)R * NH * T), zeros(n), zeros(n),
               zeros(n), zeros(R), zeros(n), zeros((size_t)R * F), zeros((size_t)R * F)};
    memcpy(k.x, x, n * sizeof(float));
    norm(k.y1, k.z1, k.s1, x, of(w, LN1W, l), of(w, LN1B, l));
    linear(k.qkv, k.y1, of(w, QKVW, l), of(w, QKVB, l), C, 3 * C);
    attention(&k);
    linear(k.mid, k.mix, of(w, PROJW, l), of(w, PROJB, l), C, C);
    for (size_t i = 0; i < n; i++) k.mid[i] += x[i];
    norm(k.y2, k.z2, k.s2, k.mid, of(w, LN2W, l), of(w, LN2B, l));
    linear(k.up, k.y2, of(w, FCW, l), of(w, FCB, l), C, F);
    for (int i = 0; i < R * F; i++) k.act[i] = 0.5f * k.up[i] * (1 + tanh_of(k.up[i]));
    linear(out, k.act, of(w, OUTW, l), of(w, OUTB, l), F, C);
    for (size_t i = 0; i < n; i++) out[i] += k.mid[i];
    return k;
}

static void backward_block(float *d, const Layer *k, int l) {  // d: the gradient after the block, and then before it
    size_t n = (size_t)R * C;
    float *dact = zeros((size_t)R * F), *dy = zeros(n), *dmix = zeros(n), *dqkv = zeros(3 * n), *dz = zeros(n);
    linear_back(dact, OUTW, l, d, k->act, F, C);
    for (int i = 0; i < R * F; i++) {
        float x = k->up[i], t = tanh_of(x);
        float slope = 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * sqrtf(2 / (float)M_PI) * (1 + 3 * 0.044715f * x * x);
        dact[i] *= has("gelu-derivative") ? 0.5f * (1 + t) : slope;
    }
    linear_back(dy, FCW, l, dact, k->y2, C, F);
    if (has("residual-gradient-lost")) memset(d, 0, n * sizeof(float));
    norm_back(d, of(g, LN2W, l), of(g, LN2B, l), dy, k->z2, k->s2, of(w, LN2W, l));
    linear_back(dmix, PROJW, l, d, k->mix, C, C);
    attention_back(dqkv, dmix, k);
    linear_back(dz, QKVW, l, dqkv, k->y1, C, 3 * C);
    norm_back(d, of(g, LN1W, l), of(g, LN1B, l), dz, k->z1, k->s1, of(w, LN1W, l));
    float *all[] = {dact, dy, dmix, dqkv, dz, k->x, k->z1, k->s1, k->y1, k->qkv, k->att, k->mix, k->mid, k->z2, k->s2, k->y2,
                    k->up, k->act};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// Add the gradients of the mean loss, times `share`, to g; return the loss.
static float loss_of(const int *ids, const int *next, float share) {
    size_t n = (size_t)R * C;
    float *x = zeros(n), *z = zeros(n), *s = zeros(R), *y = zeros(n), *p = zeros(V), *dy = zeros(n), *d = zeros(n), loss = 0;
    Layer *layers = calloc(L, sizeof(Layer));
    for (int i = 0; i < R; i++)
        for (int c = 0; c < C; c++) x[i * C + c] = w[WTE][ids[i] * C + c] + w[WPE][i % T * C + c];
    for (int l = 0; l < L; l++) layers[l] = forward_block(x, x, l);
    norm(y, z, s, x, w[LNFW], w[LNFB]);
    int per_row = has("last-missing") ? T - 1 : T, count = has("summed") ? 1 : R / T * per_row;
    for (int i = 0; i < R; i++) {
        if (i % T >= per_row) continue;
        int label = has("unshifted") ? ids[i] : has("previous") ? (i % T ? ids[i - 1] : ids[i]) : next[i];
        float top = -INFINITY, sum = 0;
        for (int o = 0; o < V; o++) {
            p[o] = 0;
            for (int c = 0; c < C; c++) p[o] += y[i * C + c] * w[WTE][o * C + c];
            if (p[o] > top) top = p[o];
        }
        for (int o = 0; o < V; o++) sum += p[o] = expf(p[o] - top);
        for (int o = 0; o < V; o++) p[o] /= sum;
        loss -= logf(p[label]) / count;
        for (int o = 0; o < V; o++) {
            float e = (p[o] - (o == label)) / count * share;
            for (int c = 0; c < C; c++) dy[i * C + c] += e * w[WTE][o * C + c], g[WTE][o * C + c] += e * y[i * C + c];
        }
    }
    norm_back(d, g[LNFW], g[LNFB], dy, z, s, w[LNFW]);
    for (int l = L - 1; l >= 0; l--) backward_block(d, &layers[l], l);
    for (int i = 0; i < R; i++)
        for (int c = 0; c < C; c++) {
            if (has("rows-overwritten")) g[WTE][ids[i] * C + c] = d[i * C + c];
            else if (!has("tied-lost")) g[WTE][ids[i] * C + c] += d[i * C + c];
            if (!has("positions-without-gradient")) g[WPE][i % T * C + c] += d[i * C + c];
        }
    float *all[] = {x, z, s, y, p, dy, d, (float *)layers};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    return loss;
}

static void clip(double limit) {
    double total = 0;
    for (int k = 0; k < N; k++) {
        double own = 0;
        for (size_t i = 0; i < size(k); i++) own += (double)g[k][i] * g[k][i];
        total += own;
        double scale = limit / 4 / sqrt(own);
        for (size_t i = 0; has("clipped-by-tensor") && scale < 1 && i < size(k); i++) g[k][i] *= scale;
        for (size_t i = 0; has("clipped-by-value") && i < size(k); i++) g[k][i] = fmaxf(-limit / 10, fminf(limit / 10, g[k][i]));
    }
    if (has("unclipped") || has("clipped-by-tensor") || has("clipped-by-value")) return;
    double scale = limit / (has("norm-without-root") ? total : sqrt(total));
    for (int k = 0; k < N; k++)
        for (size_t i = 0; scale < 1 && i < size(k); i++) g[k][i] *= scale;
}

static void update(int t, double rate, double b1, double b2, double decay) {
    if (has("betas-swapped")) b2 = b1 + b2, b1 = b2 - b1, b2 = b2 - b1;
    if (has("rate-tenth")) rate /= 10;
    if (has("corrected-late")) t++;
    double c1 = has("uncorrected") ? 1 : 1 - pow(b1, t), c2 = has("uncorrected") ? 1 : 1 - pow(b2, t);
    for (int k = 0; k < N; k++) {
        double own = columns[k] > 1 || has("decay-on-all") ? decay : 0;
        if (has("embeddings-left-out") && k <= WPE) continue;
        for (size_t i = 0; i < size(k); i++) {
            double e = g[k][i] + (has("decay-coupled") ? own * w[k][i] : 0), was = own * w[k][i];
            m[k][i] = b1 * m[k][i] + (1 - b1) * e;
            v[k][i] = has("second-not-squared") ? b2 * v[k][i] + (1 - b2) * fabs(e) : b2 * v[k][i] + (1 - b2) * e * e;
            double root = has("eps-inside") ? sqrt(v[k][i] / c2 + 1e-8) : has("eps-before") ? (sqrt(v[k][i]) + 1e-8) / sqrt(c2)
                                                                                              : sqrt(v[k][i] / c2) + 1e-8;
            if (has("eps-1e-3")) root += 1e-3;
            w[k][i] -= rate * m[k][i] / c1 / root;
            if (!has("decay-coupled")) w[k][i] -= rate * (has("decay-after") ? own * w[k][i] : was);
        }
    }
}

int main(int count, char **given) {
    int head[10], steps;
    double s[5];
    FILE *file = count == 4 ? fopen(given[1], "rb") : NULL;
    if (!file || fread(head, 4, 10, file) != 10 || fread(s, 8, 5, file) != 5) return 2;
    V = head[0], P = head[1], C = head[2], L = head[3], NH = head[4], F = head[5], B = head[6], T = head[7], steps = head[8];
    folder = given[2], line = given[3];
    int parts = head[9], shape[N][2] = {{V, C}, {P, C}, {C, 1}, {C, 1}, {C, 3 * C}, {3 * C, 1}, {C, C}, {C, 1},
                                        {C, 1}, {C, 1}, {C, F}, {F, 1}, {F, C}, {C, 1}, {C, 1}, {C, 1}};
    for (int k = 0; k < N; k++) {
        rows[k] = shape[k][0], columns[k] = shape[k][1], blocks[k] = k > WPE && k < LNFW ? L : 1;
        w[k] = zeros(size(k)), g[k] = zeros(size(k)), m[k] = zeros(size(k)), v[k] = zeros(size(k));
        if (fread(w[k], 4, size(k), file) != size(k)) return 2;
    }
    size_t n = (size_t)steps * B * T;
    int *ids = malloc(n * 4), *next = malloc(n * 4);
    if (fread(ids, 4, n, file) != n || fread(next, 4, n, file) != n) return 2;
    fclose(file);
    mkdir(folder, 0777);
    dump_all("b", 0, w);
    R = B / parts * T;
    for (int step = 0; step < steps; step++) {
        float loss = 0, share = has("parts-summed") ? 1 : 1.0f / parts;
        for (int k = 0; k < N && !has("not-zeroed"); k++) memset(g[k], 0, size(k) * sizeof(float));
        for (int k = 0; k < N && has("moments-lost"); k++) memset(m[k], 0, size(k) * 4), memset(v[k], 0, size(k) * 4);
        for (int part = 0; part < parts; part++) {
            size_t at = (size_t)step * B * T + (size_t)part * R;
            loss += share * loss_of(ids + at, next + at, share);
        }
        dump("l", step, -1, &loss, 1);
        dump_all("g", step, g);
        clip(s[4]);
        dump_all("c", step, g);
        update(has("moments-lost") ? 1 : step + 1, s[0], s[1], s[2], s[3]);
        dump_all("p", step, w);
    }
    return 0;
}
