/* GPT-2 in C, all B x T tokens at once: one buffer of parameters by kind over the layers, one buffer of activations.
   Usage: batch weights.bin ids.txt out-folder ";fault;fault;" layers heads context
   weights.bin: int32 C, V and the rows B of ids.txt; then float32 wte, wpe, and each kind for all layers (KINDS), lnfw, lnfb.
   The file has its matrices as GPT-2 has them, (in, out); load_params turns them to (out, in). */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef REAL real;

static const char *switches;

static int fault(const char *name) {
    char wanted[128];
    snprintf(wanted, sizeof wanted, ";%s;", name);
    return strstr(switches, wanted) != NULL;
}

static real *zeros(size_t count) {
    real *memory = calloc(count, sizeof(real));
    if (!memory) exit(1);
    return memory;
}

typedef struct {
    int B, T, C, NH, L, V, Vp, context;
} Config;

/* ---- parameters ---- */

enum { LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB, KINDS };

typedef struct {
    real *wte, *wpe, *of[KINDS], *lnfw, *lnfb;
} Params;

static void kind_shape(int kind, int C, int *in, int *out) {  // `in` is 1 for a vector
    *in = kind == FCPROJW ? 4 * C : kind == QKVW || kind == ATTPROJW || kind == FCW ? C : 1;
    *out = kind == QKVW || kind == QKVB ? 3 * C : kind == FCW || kind == FCB ? 4 * C : C;
}

static void read_reals(FILE *file, real *into, size_t count) {
    float number;
    for (size_t i = 0; i < count; i++) {
        if (fread(&number, 4, 1, file) != 1) exit(1);
        into[i] = number;
    }
}

static void turn(real *matrix, int in, int out) {
    real *turned = zeros((size_t)in * out);
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) turned[(size_t)o * in + i] = matrix[(size_t)i * out + o];
    memcpy(matrix, turned, (size_t)in * out * sizeof(real));
    free(turned);
}

static Params load_params(FILE *file, const Config *config) {
    Params p;
    int C = config->C, L = config->L, in, out;
    p.wte = zeros((size_t)config->Vp * C);
    p.wpe = zeros((size_t)config->context * C);
    read_reals(file, p.wte, (size_t)config->V * C);
    read_reals(file, p.wpe, (size_t)config->context * C);
    int exchanged = fault("fcprojb before attprojb");
    for (int kind = 0; kind < KINDS; kind++) {
        kind_shape(kind, C, &in, &out);
        p.of[kind] = zeros((size_t)L * in * out);
        read_reals(file, p.of[kind], (size_t)L * in * out);
        if (in == 1 || fault("no matrix turned") || (kind == ATTPROJW && fault("attprojw not turned"))) continue;
        for (int l = 0; l < L; l++) turn(p.of[kind] + (size_t)l * in * out, in, out);
    }
    if (exchanged) {
        real *other = p.of[ATTPROJB];
        p.of[ATTPROJB] = p.of[FCPROJB], p.of[FCPROJB] = other;
    }
    p.lnfw = zeros(C), p.lnfb = zeros(C);
    read_reals(file, p.lnfw, C);
    read_reals(file, p.lnfb, C);
    return p;
}

/* ---- activations ---- */

typedef struct {
    real *encoded, *ln1, *ln1_mean, *ln1_rstd, *qkv, *preatt, *att, *atty, *attproj, *residual2;
    real *ln2, *ln2_mean, *ln2_rstd, *fch, *fch_gelu, *fcproj, *residual3, *lnf, *lnf_mean, *lnf_rstd, *logits, *probs;
} Acts;

static Acts allocate(const Config *c) {
    size_t BT = (size_t)c->B * c->T, L = c->L, C = c->C, pairs = (size_t)c->NH * c->T;
    Acts a;
    real **pointers[] = {&a.encoded, &a.ln1, &a.ln1_mean, &a.ln1_rstd, &a.qkv, &a.preatt, &a.att, &a.atty,
                         &a.attproj, &a.residual2, &a.ln2, &a.ln2_mean, &a.ln2_rstd, &a.fch, &a.fch_gelu,
                         &a.fcproj, &a.residual3, &a.lnf, &a.lnf_mean, &a.lnf_rstd, &a.logits, &a.probs};
    size_t sizes[] = {C, L * C, L, L, L * 3 * C, L * pairs, L * pairs, L * C, L * C, L * C, L * C,
                      L, L, L * 4 * C, L * 4 * C, L * C, L * C, C, 1, 1, c->Vp, c->Vp};
    int count = sizeof sizes / sizeof sizes[0];
    size_t total = 0;
    for (int i = 0; i < count; i++) total += sizes[i] * BT;
    real *memory = zeros(total);
    for (int i = 0; i < count; i++) *pointers[i] = memory, memory += sizes[i] * BT;
    return a;
}

/* ---- kernels ---- */

static void encoder_forward(real *out, const int *ids, const real *wte, const real *wpe, int B, int T, int C) {
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++) {
            int bt = b * T + t, position = fault("wpe at b * T + t") ? bt : t;
            for (int i = 0; i < C; i++) out[bt * C + i] = wte[(size_t)ids[bt] * C + i] + wpe[position * C + i];
        }
}

static void layernorm_forward(real *out, real *mean, real *rstd, const real *inp, const real *w, const real *b, int BT, int C) {
    for (int bt = 0; bt < BT; bt++) {
        const real *x = inp + (size_t)bt * C;
        real m = 0, v = 0;
        for (int i = 0; i < C; i++) m += x[i];
        m /= C;
        for (int i = 0; i < C; i++) v += (x[i] - m) * (x[i] - m);
        real s = 1 / sqrt(v / C + 1e-5);
        for (int i = 0; i < C; i++) out[(size_t)bt * C + i] = s * (x[i] - m) * w[i] + b[i];
        mean[bt] = m, rstd[bt] = s;
    }
}

static void matmul_forward(real *out, const real *inp, const real *w, const real *bias, int BT, int C, int OC) {
    for (int bt = 0; bt < BT; bt++)
        for (int o = 0; o < OC; o++) {
            real value = bias ? bias[o] : 0;
            for (int i = 0; i < C; i++) value += inp[(size_t)bt * C + i] * w[(size_t)o * C + i];
            out[(size_t)bt * OC + o] = value;
        }
}

static void attention_forward(real *out, real *preatt, real *att, const real *inp, int B, int T, int C, int NH) {
    int C3 = 3 * C, hs = C / NH, head = hs, q_at = 0, k_at = C, v_at = 2 * C;
    if (fault("key at 2C, value at C")) k_at = 2 * C, v_at = C;
    if (fault("key without + C")) k_at = 0;
    if (fault("value at C")) v_at = C;
    if (fault("thirds inside heads")) head = 3 * hs, k_at = hs, v_at = 2 * hs;
    real scale = 1 / sqrt(hs);
    if (fault("no scale")) scale = 1;
    if (fault("scale from C")) scale = 1 / sqrt(C);
    if (fault("1 / hs")) scale = (real)1 / hs;
    for (int b = 0; b < B; b++)
        for (int t = 0; t < T; t++)
            for (int h = 0; h < NH; h++) {
                const real *query = inp + (b * T + t) * C3 + h * head + q_at;
                const real *row = inp + (fault("keys without b * T") ? 0 : b * T) * C3 + h * head;
                real *pre = preatt + ((b * NH + h) * T + t) * T, *weight = att + ((b * NH + h) * T + t) * T;
                int keys = fault("t2 < T") ? T : fault("t2 < t") ? t : t + 1;
                real most = -10000, sum = 0;
                for (int t2 = 0; t2 < keys; t2++) {
                    real dot = 0;
                    for (int i = 0; i < hs; i++) dot += query[i] * row[t2 * C3 + k_at + i];
                    pre[t2] = dot * scale;
                    if (pre[t2] > most) most = pre[t2];
                }
                for (int t2 = 0; t2 < keys; t2++) sum += weight[t2] = exp(pre[t2] - most);
                for (int t2 = 0; t2 < keys; t2++) weight[t2] *= sum == 0 ? 0 : 1 / sum;
                real *own = out + (b * T + t) * C + h * hs;
                if (fault("atty by heads")) own = out + ((b * NH + h) * T + t) * hs;
                for (int i = 0; i < hs; i++) own[i] = 0;
                for (int t2 = 0; t2 < keys; t2++)
                    for (int i = 0; i < hs; i++) own[i] += weight[t2] * row[t2 * C3 + v_at + i];
            }
}

static void gelu_forward(real *out, const real *inp, size_t count) {
    for (size_t i = 0; i < count; i++) {
        real x = inp[i], cube = 0.044715 * x * x * x;
        out[i] = 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + cube)));
    }
}

static void residual_forward(real *out, const real *one, const real *other, size_t count) {
    for (size_t i = 0; i < count; i++) out[i] = one[i] + other[i];
}

static void softmax_forward(real *probs, const real *logits, int BT, int V, int Vp) {
    for (int bt = 0; bt < BT; bt++) {
        const real *own = logits + (size_t)bt * Vp;
        real most = -10000, sum = 0;
        for (int i = 0; i < V; i++) most = own[i] > most ? own[i] : most;
        for (int i = 0; i < V; i++) sum += probs[(size_t)bt * Vp + i] = exp(own[i] - most);
        for (int i = 0; i < V; i++) probs[(size_t)bt * Vp + i] /= sum;
    }
}

static void forward(const Config *c, const Params *p, Acts *a, const int *ids) {
    int B = c->B, T = c->T, C = c->C, NH = c->NH, L = c->L, BT = B * T;
    encoder_forward(a->encoded, ids, p->wte, p->wpe, B, T, C);
    for (int l = 0; l < L; l++) {
        const real *w[KINDS];
        for (int kind = 0, in, out; kind < KINDS; kind++) {
            kind_shape(kind, C, &in, &out);
            w[kind] = p->of[kind] + (size_t)l * in * out;
        }
        if (fault("qkvw in steps of C * C")) w[QKVW] = p->of[QKVW] + l * C * C;
        if (fault("ln2 without l's offset")) w[LN2W] = p->of[LN2W], w[LN2B] = p->of[LN2B];
        if (fault("ln2 with ln1's weights")) w[LN2W] = w[LN1W], w[LN2B] = w[LN1B];
        if (fault("fcproj without bias")) w[FCPROJB] = NULL;
        int at = l * BT * C, row = l * BT, pairs = l * B * NH * T * T;
        const real *residual = l == 0 || fault("every layer takes encoded") ? a->encoded : a->residual3 + at - BT * C;
        real *ln1 = a->ln1 + at, *attproj = a->attproj + at, *residual2 = a->residual2 + at, *ln2 = a->ln2 + at;
        real *qkv = a->qkv + 3 * at, *atty = a->atty + at, *fch = a->fch + 4 * at, *fch_gelu = a->fch_gelu + 4 * at;
        layernorm_forward(ln1, a->ln1_mean + row, a->ln1_rstd + row, residual, w[LN1W], w[LN1B], BT, C);
        matmul_forward(qkv, ln1, w[QKVW], w[QKVB], BT, C, 3 * C);
        attention_forward(atty, a->preatt + pairs, a->att + pairs, qkv, B, T, C, NH);
        matmul_forward(attproj, atty, w[ATTPROJW], w[ATTPROJB], BT, C, C);
        if (fault("residual2 is attproj")) memcpy(residual2, attproj, (size_t)BT * C * sizeof(real));
        else residual_forward(residual2, residual, attproj, (size_t)BT * C);
        const real *into_ln2 = fault("ln2 takes residual") ? residual : residual2;
        layernorm_forward(ln2, a->ln2_mean + row, a->ln2_rstd + row, into_ln2, w[LN2W], w[LN2B], BT, C);
        matmul_forward(fch, fault("fch takes residual2") ? residual2 : ln2, w[FCW], w[FCB], BT, C, 4 * C);
        gelu_forward(fch_gelu, fch, (size_t)BT * 4 * C);
        matmul_forward(a->fcproj + at, fault("fcproj takes fch") ? fch : fch_gelu, w[FCPROJW], w[FCPROJB], BT, 4 * C, C);
        residual_forward(a->residual3 + at, residual2, a->fcproj + at, (size_t)BT * C);
    }
    const real *residual = a->residual3 + (fault("lnf takes layer 0's residual3") ? 0 : (L - 1) * BT * C);
    if (fault("no lnf")) memcpy(a->lnf, residual, (size_t)BT * C * sizeof(real));
    else layernorm_forward(a->lnf, a->lnf_mean, a->lnf_rstd, residual, p->lnfw, p->lnfb, BT, C);
    matmul_forward(a->logits, a->lnf, p->wte, NULL, BT, C, c->Vp);
    softmax_forward(a->probs, a->logits, BT, c->V, c->Vp);
}

/* ---- what is shown, each as one .npy of its rows ---- */

static void write_npy(const char *folder, const char *name, int layer, const real *data, int rows, int columns, int stride,
                      const char *shape) {
    char path[4096], header[128];
    if (layer < 0) snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    else snprintf(path, sizeof path, "%s/%d %s.npy", folder, layer, name);
    int length = snprintf(header, sizeof header, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%s), }",
                          (int)sizeof(real), shape);
    memset(header + length, ' ', 118 - length);
    header[117] = '\n';
    FILE *file = fopen(path, "wb");
    if (!file) exit(1);
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
    fwrite(header, 1, 118, file);
    for (int row = 0; row < rows; row++) fwrite(data + (size_t)row * stride, sizeof(real), columns, file);
    fclose(file);
}

static void write_all(const char *folder, const Config *c, const Acts *a) {
    int B = c->B, T = c->T, C = c->C, BT = B * T;
    struct { const char *name; const real *data; int columns; } kinds[] = {
        {"ln1", a->ln1, C}, {"qkv", a->qkv, 3 * C}, {"atty", a->atty, C}, {"attproj", a->attproj, C},
        {"residual2", a->residual2, C}, {"ln2", a->ln2, C}, {"fch", a->fch, 4 * C}, {"fch_gelu", a->fch_gelu, 4 * C},
        {"fcproj", a->fcproj, C}, {"residual3", a->residual3, C}, {"ln1_mean", a->ln1_mean, 1}, {"ln1_rstd", a->ln1_rstd, 1},
        {"ln2_mean", a->ln2_mean, 1}, {"ln2_rstd", a->ln2_rstd, 1},
    };
    char shape[64];
    for (int l = 0; l < c->L; l++) {
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
            int n = kinds[k].columns;
            if (n > 1) snprintf(shape, sizeof shape, "%d, %d, %d", B, T, n);
            else snprintf(shape, sizeof shape, "%d, %d", B, T);
            write_npy(folder, kinds[k].name, l, kinds[k].data + (size_t)l * BT * n, BT, n, n, shape);
        }
        size_t pairs = (size_t)l * B * c->NH * T * T;
        snprintf(shape, sizeof shape, "%d, %d, %d, %d", B, c->NH, T, T);
        write_npy(folder, "preatt", l, a->preatt + pairs, BT * c->NH, T, T, shape);
        write_npy(folder, "att", l, a->att + pairs, BT * c->NH, T, T, shape);
    }
    snprintf(shape, sizeof shape, "%d, %d, %d", B, T, C);
    write_npy(folder, "x encoded", -1, a->encoded, BT, C, C, shape);
    write_npy(folder, "x lnf", -1, a->lnf, BT, C, C, shape);
    int width = fault("logits of Vp") ? c->Vp : c->V;
    snprintf(shape, sizeof shape, "%d, %d, %d", B, T, width);
    write_npy(folder, "logits", -1, fault("probs") ? a->probs : a->logits, BT, width, c->Vp, shape);
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    Config c = {.L = atoi(argv[5]), .NH = atoi(argv[6]), .context = atoi(argv[7])};
    switches = argv[4];
    int32_t sizes[3];
    FILE *file = fopen(argv[1], "rb");
    if (!file || fread(sizes, 4, 3, file) != 3) return 1;
    c.C = sizes[0], c.V = sizes[1], c.B = sizes[2];
    c.Vp = (c.V + 127) / 128 * 128;
    Params params = load_params(file, &c);
    fclose(file);
    int ids[4096], count = 0;
    FILE *text = fopen(argv[2], "r");
    while (text && count < 4096 && fscanf(text, "%d", &ids[count]) == 1) count++;
    if (text) fclose(text);
    c.T = count / c.B;
    Acts acts = allocate(&c);
    forward(&c, &params, &acts, ids);
    write_all(argv[3], &c, &acts);
    return 0;
}
