// A GPT-2 in C: one flat loop after another over [B, T, C], float32. A program; it needs a C compiler and nothing else.
//
//   flat_port IDS.txt OUT_FOLDER WEIGHTS.bin FAULTS LEVEL DTYPE SEED
//
// IDS.txt has a row of ids a line. WEIGHTS.bin: int32 V P C L NH F, then float32 wte, wpe, and each kind of tensor of a block
// over all blocks (see `kinds`), matrices [in, out], then ln_f. FAULTS: a line in the words of tests/support/faulty/meanings.toml,
// "" for none. LEVEL: full, block, logits. SEED of the arrays that have nothing to do with the model, -1 for none.
// OUT_FOLDER gets .npy files.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int V, P, C, L, NH, F, B, T;
static const char *line, *level, *dtype, *folder;

static void die(const char *what, const char *where) {
    fprintf(stderr, "flat_port: %s: %s\n", what, where);
    exit(1);
}

static float *zeros(size_t n) {
    float *p = calloc(n ? n : 1, sizeof(float));
    if (!p) die("out of memory", "calloc");
    return p;
}

// ---- faults -------------------------------------------------------------------------------------------------------------

// Whether a word of the line holds at a place: "1" a block, "1.ln_2" a norm of it, "f" the final norm, "" the whole model.
static int has(const char *word, const char *place) {
    size_t n = strlen(word);
    for (const char *at = line; (at = strstr(at, word)); at += n) {
        if (at != line && at[-1] != ' ') continue;
        if (at[n] == '\0' || at[n] == ' ') return 1;
        if (at[n] != '@') continue;
        for (const char *site = at + n + 1; *site && *site != ' ';) {
            size_t size = strcspn(site, ", ");
            if (!strncmp(place, site, size) && (place[size] == '\0' || place[size] == '.')) return 1;
            site += size;
            if (*site == ',') site++;
        }
    }
    return 0;
}

static int in_block(const char *word, int l) {
    char place[16];
    snprintf(place, sizeof place, "%d", l);
    return has(word, place);
}

// ---- output -------------------------------------------------------------------------------------------------------------

static FILE *npy(const char *name, const char *descr, int nd, const int *shape) {
    char path[1024], sizes[128] = "", header[256];
    for (int i = 0; i < nd; i++) snprintf(sizes + strlen(sizes), sizeof sizes - strlen(sizes), "%d,", shape[i]);
    int n = snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, sizes);
    int padded = (10 + n + 1 + 63) / 64 * 64 - 10;
    while (n < padded - 1) header[n++] = ' ';
    header[n++] = '\n';
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    for (int again = 2; access(path, F_OK) == 0; again++) snprintf(path, sizeof path, "%s/%s_%d.npy", folder, name, again);
    FILE *file = fopen(path, "wb");
    if (!file) die("cannot write", path);
    uint16_t size = (uint16_t)padded;
    fwrite("\x93NUMPY\x01\x00", 1, 8, file);
    fwrite(&size, 2, 1, file);
    fwrite(header, 1, padded, file);
    return file;
}

static void write_floats(const char *name, const float *x, int nd, const int *shape) {
    size_t n = 1;
    for (int i = 0; i < nd; i++) n *= shape[i];
    int half = !strcmp(dtype, "float16"), wide = !strcmp(dtype, "float64");
    FILE *file = npy(name, half ? "<f2" : wide ? "<f8" : "<f4", nd, shape);
    for (size_t i = 0; i < n; i++) {
        double d = x[i];
        _Float16 h = (_Float16)x[i];
        if (half) fwrite(&h, 2, 1, file);
        else if (wide) fwrite(&d, 8, 1, file);
        else fwrite(&x[i], 4, 1, file);
    }
    fclose(file);
}

static void keep(int rank, const char *name, int l, const float *x, int nd, int a, int b, int c, int d) {
    // rank 0: logits; 1: one tensor a block; 2: everything
    if (rank > (!strcmp(level, "logits") ? 0 : !strcmp(level, "block") ? 1 : 2)) return;
    char full[64];
    if (l < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "l%d_%s", l, name);
    int shape[4] = {a, b, c, d};
    write_floats(full, x, nd, shape);
}

// ---- weights ------------------------------------------------------------------------------------------------------------

enum { LN1W, LN1B, QKVW, QKVB, PROJW, PROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, KINDS };
static float *wte, *wpe, *lnfw, *lnfb, *kinds[KINDS];
static size_t sizes[KINDS];

static float *take(FILE *file, size_t n, const char *path) {
    float *p = zeros(n);
    if (fread(p, sizeof(float), n, file) != n) die("is too short", path);
    return p;
}

static float *of(int kind, int l) { return kinds[kind] + l * sizes[kind]; }

static void copy(int to, int l, int from, int m) { memcpy(of(to, l), of(from, m), sizes[to] * sizeof(float)); }

static void swap(float *a, float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        float kept = a[i];
        a[i] = b[i];
        b[i] = kept;
    }
}

static void turn(float *w, int stride) {  // a square matrix of C x C, transposed in place
    for (int i = 0; i < C; i++)
        for (int j = i + 1; j < C; j++) swap(w + i * stride + j, w + j * stride + i, 1);
}

static float bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

static void thirds(int l, const int *from) {  // q, k, v take the columns of these thirds
    for (int row = 0; row <= C; row++) {
        float *at = row < C ? of(QKVW, l) + row * 3 * C : of(QKVB, l), *was = zeros(3 * C);
        memcpy(was, at, 3 * C * sizeof(float));
        for (int i = 0; i < 3; i++) memcpy(at + i * C, was + from[i] * C, C * sizeof(float));
        free(was);
    }
}

static void interleave(int l) {  // columns read as (NH, 3, K) where the file has (3, NH, K)
    int K = C / NH;
    for (int row = 0; row <= C; row++) {
        float *at = row < C ? of(QKVW, l) + row * 3 * C : of(QKVB, l), *was = zeros(3 * C);
        memcpy(was, at, 3 * C * sizeof(float));
        for (int part = 0; part < 3; part++)
            for (int h = 0; h < NH; h++) memcpy(at + part * C + h * K, was + (h * 3 + part) * K, K * sizeof(float));
        free(was);
    }
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    int32_t head[6];
    if (!file || fread(head, 4, 6, file) != 6) die("cannot read", path);
    V = head[0], P = head[1], C = head[2], L = head[3], NH = head[4], F = head[5];
    size_t all[KINDS] = {C, C, (size_t)C * 3 * C, 3 * C, (size_t)C * C, C, C, C, (size_t)C * F, F, (size_t)F * C, C};
    memcpy(sizes, all, sizeof all);
    wte = take(file, (size_t)V * C, path), wpe = take(file, (size_t)P * C, path);
    for (int i = 0; i < KINDS; i++) kinds[i] = take(file, L * sizes[i], path);
    lnfw = take(file, C, path), lnfb = take(file, C, path);
    fclose(file);
    float *first_fcw = zeros(sizes[FCW]), *first_fcb = zeros(F);
    memcpy(first_fcw, of(FCW, 0), sizes[FCW] * sizeof(float)), memcpy(first_fcb, of(FCB, 0), F * sizeof(float));
    for (int l = 0; l < L; l++) {
        if (in_block("transposed-proj", l)) turn(of(PROJW, l), C);
        if (in_block("transposed-q", l)) turn(of(QKVW, l), 3 * C);
        if (in_block("qkv-kqv", l)) thirds(l, (int[]){1, 0, 2});
        if (in_block("qkv-vkq", l)) thirds(l, (int[]){2, 1, 0});
        if (in_block("head-interleaved", l)) interleave(l);
        if (in_block("no-qkv-bias", l)) memset(of(QKVB, l), 0, 3 * C * sizeof(float));
        if (in_block("no-out-bias", l)) memset(of(PROJB, l), 0, C * sizeof(float));
        if (in_block("no-fc-bias", l)) memset(of(FCB, l), 0, F * sizeof(float));
        if (in_block("wrong-bias", l)) copy(PROJB, l, FCPROJB, l);
        if (in_block("wrong-ln_1", l)) copy(LN1W, l, LN2W, l), copy(LN1B, l, LN2B, l);
        if (in_block("gamma-beta", l)) swap(of(LN1W, l), of(LN1B, l), C);
        if (in_block("norm-weights-swapped", l)) swap(of(LN1W, l), of(LN2W, l), C), swap(of(LN1B, l), of(LN2B, l), C);
        if (in_block("wrong-fc", l)) {
            memcpy(of(FCW, l), l + 1 < L ? of(FCW, l + 1) : first_fcw, sizes[FCW] * sizeof(float));
            memcpy(of(FCB, l), l + 1 < L ? of(FCB, l + 1) : first_fcb, F * sizeof(float));
        }
        for (size_t i = 0; in_block("bf16-fc", l) && i < sizes[FCW]; i++) of(FCW, l)[i] = bfloat16(of(FCW, l)[i]);
        for (int i = 0; l && in_block("wrong-all-first", l) && i < KINDS; i++) copy(i, l, i, 0);
    }
}

// ---- the forward pass ---------------------------------------------------------------------------------------------------

static void layernorm(float *out, const float *in, const float *w, const float *b, const char *place) {
    for (int i = 0; i < B * T; i++) {
        const float *x = in + i * C;
        float m = 0, v = 0, eps = 1e-5f, s;
        for (int c = 0; c < C; c++) m += x[c];
        m = has("rmsnorm", place) ? 0 : m / C;
        for (int c = 0; c < C; c++) v += (x[c] - m) * (x[c] - m);
        v /= has("unbiased", place) ? C - 1 : C;
        if (has("eps-1e-6", place)) eps = 1e-6f;
        if (has("eps-1e-12", place)) eps = 1e-12f;
        if (has("eps-1e-3", place)) eps = 1e-3f;
        if (has("eps-none", place)) eps = 0;
        s = 1 / sqrtf(v + eps);
        if (has("not-normalising", place)) m = 0, s = 1;
        for (int c = 0; c < C; c++) out[i * C + c] = (x[c] - m) * s;
        if (w && !has("no-affine", place))
            for (int c = 0; c < C; c++) out[i * C + c] = out[i * C + c] * w[c] + b[c];
    }
}

static void matmul(float *out, const float *in, const float *w, const float *b, int from, int to) {
    for (int i = 0; i < B * T; i++)
        for (int o = 0; o < to; o++) {
            float sum = b[o];
            for (int c = 0; c < from; c++) sum += in[i * from + c] * w[c * to + o];
            out[i * to + o] = sum;
        }
}

static float gelu(float x, int l) {
    if (in_block("gelu-erf", l)) return 0.5f * x * (1 + erff(x / sqrtf(2)));
    if (in_block("gelu-quick", l)) return x / (1 + expf(-1.702f * x));
    if (in_block("gelu-silu", l)) return x / (1 + expf(-x));
    if (in_block("gelu-relu", l)) return x > 0 ? x : 0;
    if (in_block("gelu-none", l)) return x;
    return 0.5f * x * (1 + tanhf(sqrtf(2 / (float)M_PI) * (x + 0.044715f * x * x * x)));
}

static void attention(float *out, float *preatt, float *att, const float *qkv, int l) {
    int K = C / NH, future = in_block("mask-missing", l), zeroed = in_block("mask-multiplied", l);
    int ahead = in_block("mask-strict", l) ? 0 : in_block("mask-off-by-one", l) ? 2 : 1;
    float scale = 1 / sqrtf(in_block("scale-by-width", l) ? C : K);
    if (in_block("scale-missing", l)) scale = 1;
    if (in_block("scale-twice", l)) scale /= sqrtf(K);
    if (in_block("scale-inverse-layer", l)) scale /= l + 1;
    int from = in_block("value-from-key", l) ? C : in_block("value-from-query", l) ? 0 : 2 * C;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int h = 0; h < NH; h++) {
                size_t row = (((size_t)b * NH + h) * T + t) * T;
                const float *q = qkv + (b * T + t) * 3 * C + h * K;
                float max = -INFINITY, sum = 0;
                int seen = future || zeroed || t + ahead > T ? T : t + ahead;
                for (int s = 0; s < seen; s++) {
                    const float *k = qkv + (b * T + s) * 3 * C + C + h * K;
                    float dot = 0;
                    for (int i = 0; i < K; i++) dot += q[i] * k[i];
                    dot *= zeroed && s > t ? 0 : scale;
                    if (dot > max) max = dot;
                    preatt[row + s] = dot;
                }
                for (int s = 0; s < seen; s++) sum += att[row + s] = expf(preatt[row + s] - max);
                for (int s = 0; s < seen; s++) att[row + s] = sum == 0 ? 0 : att[row + s] / sum;
                if (in_block("softmax-missing", l)) memcpy(att + row, preatt + row, seen * sizeof(float));
                for (int i = 0; i < K; i++) {
                    float y = 0;
                    for (int s = 0; s < seen; s++) y += att[row + s] * qkv[(b * T + s) * 3 * C + from + h * K + i];
                    int merged = in_block("heads-merged-wrongly", l) ? ((b * NH + h) * T + t) * K + i : (b * T + t) * C + h * K + i;
                    out[merged] = y;
                }
            }
}

static void block(float *x, int l) {
    size_t n = (size_t)B * T * C;
    float *y = zeros(n), *qkv = zeros(3 * n), *preatt = zeros((size_t)B * NH * T * T), *att = zeros((size_t)B * NH * T * T);
    float *mixed = zeros(n), *branch = zeros(n), *mid = zeros(n), *z = zeros(n), *up = zeros((size_t)B * T * F);
    float *act = zeros((size_t)B * T * F), *down = zeros(n);
    char first[32], second[32];
    int a = LN1W, b = LN2W;
    if (in_block("norms-swapped", l)) a = LN2W, b = LN1W;
    snprintf(first, sizeof first, "%d.ln_%d", l, a == LN1W ? 1 : 2);
    snprintf(second, sizeof second, "%d.ln_%d", l, a == LN1W ? 2 : 1);
    int post = in_block("post-norm", l), normed = in_block("residual-from-normed", l);
    if (post || in_block("ln_1-missing", l)) memcpy(y, x, n * sizeof(float));
    else layernorm(y, x, of(a, l), of(a + 1, l), first), keep(2, "ln1", l, y, 3, B, T, C, 0);
    matmul(qkv, y, of(QKVW, l), of(QKVB, l), C, 3 * C);
    keep(2, "qkv", l, qkv, 3, B, T, 3 * C, 0);
    attention(mixed, preatt, att, qkv, l);
    keep(2, "preatt", l, preatt, 4, B, NH, T, T), keep(2, "att", l, att, 4, B, NH, T, T), keep(2, "atty", l, mixed, 3, B, T, C, 0);
    if (in_block("output-projection-missing", l)) memcpy(branch, mixed, n * sizeof(float));
    else matmul(branch, mixed, of(PROJW, l), of(PROJB, l), C, C);
    keep(2, "attproj", l, branch, 3, B, T, C, 0);
    int alone = in_block("residual-missing", l) || in_block("residual-missing-attn", l);
    for (size_t i = 0; i < n; i++) mid[i] = alone ? branch[i] : (normed ? y[i] : x[i]) + branch[i];
    if (post) layernorm(mid, mid, of(a, l), of(a + 1, l), first);
    keep(2, "residual2", l, mid, 3, B, T, C, 0);
    const float *in = in_block("parallel", l) ? x : mid;
    if (post || in_block("ln_2-missing", l)) memcpy(z, in, n * sizeof(float));
    else layernorm(z, in, of(b, l), of(b + 1, l), second), keep(2, "ln2", l, z, 3, B, T, C, 0);
    matmul(up, z, of(FCW, l), of(FCB, l), C, F);
    for (int i = 0; i < B * T * F; i++) act[i] = gelu(up[i], l);
    matmul(down, act, of(FCPROJW, l), of(FCPROJB, l), F, C);
    keep(2, "fch", l, up, 3, B, T, F, 0), keep(2, "fch_gelu", l, act, 3, B, T, F, 0), keep(2, "fcproj", l, down, 3, B, T, C, 0);
    alone = in_block("residual-missing", l) || in_block("residual-missing-mlp", l);
    normed = normed || in_block("residual-from-normed-mlp", l);
    for (size_t i = 0; i < n; i++) x[i] = alone ? down[i] : (normed ? z[i] : mid[i]) + down[i];
    if (post) layernorm(x, x, of(b, l), of(b + 1, l), second);
    if (in_block("extra-norm-end", l)) layernorm(x, x, NULL, NULL, "-");
    keep(1, "residual3", l, x, 3, B, T, C, 0);
    float *all[] = {y, qkv, preatt, att, mixed, branch, mid, z, up, act, down};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void run(const int *ids) {
    float *x = zeros((size_t)B * T * C), *logits = zeros((size_t)B * T * V), *none = zeros(V), *head = zeros((size_t)C * V);
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            float e = wte[ids[i] * C + c] * (has("embedding-scaled", "") ? sqrtf(C) : 1);
            int p = i % T + has("position-offset", "");
            x[i * C + c] = has("position-missing", "") ? e : e + wpe[p * C + c];
        }
    keep(2, "encoded", -1, x, 3, B, T, C, 0);
    int reversed = has("layer-reversed", "");
    for (int i = 0; i < L; i++) {
        int l = reversed ? L - 1 - i : i;
        if (has("layer-swapped", "") && i >= L - 2) l = i == L - 1 ? L - 2 : L - 1;
        if (in_block("layer-missing", l)) continue;
        block(x, l);
        if (in_block("layer-repeated", l)) block(x, l);
    }
    if (!has("final-norm-missing", "")) layernorm(x, x, lnfw, lnfb, "f"), keep(2, "lnf", -1, x, 3, B, T, C, 0);
    for (int v = 0; v < V; v++)
        for (int c = 0; c < C; c++) {
            int i = v * C + c;
            head[c * V + v] = has("untied-head", "") ? (float)(0.02 * sin(i)) : wte[i];
            if (has("logits-scaled", "")) head[c * V + v] /= sqrtf(C);
        }
    matmul(logits, x, head, none, C, V);
    keep(0, "logits", -1, logits, 3, B, T, V, 0);
}

// ---- the rest -----------------------------------------------------------------------------------------------------------

static int *read_ids(const char *path) {
    FILE *file = fopen(path, "r");
    int *ids = malloc(sizeof(int) * 65536), n = 0, c;
    if (!file || !ids) die("cannot read", path);
    while (n < 65536 && fscanf(file, "%d", &ids[n]) == 1) {
        n++;
        do c = fgetc(file); while (c == ' ' || c == '\r');
        if (c == '\n' || c == EOF) B++;
        if (c != EOF) ungetc(c, file);
    }
    fclose(file);
    if (!B || n % B) die("rows of different lengths", path);
    T = n / B;
    return ids;
}

static float uniform(uint32_t *state) { return (*state = *state * 1664525u + 1013904223u) / 4294967296.0f - 0.5f; }

static void foreign(uint32_t seed) {  // arrays that have nothing to do with the model's arithmetic
    float *mask = zeros((size_t)T * T), *noise = zeros((size_t)B * T * C), *places = zeros(T);
    for (int i = 0; i < T * T; i++) mask[i] = i % T > i / T ? -INFINITY : 0;
    for (int i = 0; i < B * T * C; i++) noise[i] = uniform(&seed);
    for (int i = 0; i < T; i++) places[i] = i;
    write_floats("mask", mask, 2, (int[]){T, T}), write_floats("noise", noise, 3, (int[]){B, T, C}), write_floats("places", places, 1, &T);
    FILE *file = npy("lengths", "<i4", 1, &B);
    for (int b = 0; b < B; b++) fwrite(&T, 4, 1, file);
    fclose(file);
}

int main(int count, char **given) {
    if (count != 8) die("takes IDS.txt OUT_FOLDER WEIGHTS.bin FAULTS LEVEL DTYPE SEED", given[0]);
    folder = given[2], line = given[4], level = given[5], dtype = given[6];
    int *ids = read_ids(given[1]);
    load(given[3]);
    mkdir(folder, 0777);
    FILE *file = npy("tokens", "<i4", 2, (int[]){B, T});
    fwrite(ids, 4, (size_t)B * T, file);
    fclose(file);
    run(ids);
    if (atoi(given[7]) >= 0) foreign((uint32_t)atoi(given[7]));
    return 0;
}
