/* GPT-2 in C: one row of ids, one buffer for the stream that every branch is added to, scratch buffers allocated once.
   Usage: onebuffer weights.bin ids.txt out-folder ";fault;fault;" layers heads context
   weights.bin: int32 width, vocabulary, context; then float32 wte, wpe, each block's tensors in order, ln_f's two. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef REAL real;
typedef struct {
    real *ln1_g, *ln1_b, *attn_w, *attn_b, *proj_w, *proj_b, *ln2_g, *ln2_b, *fc_w, *fc_b, *down_w, *down_b;
} Block;

static const char *faults, *folder;
static int T, D, H, L, V;

static int fault(const char *name) {
    char word[128];
    snprintf(word, sizeof word, ";%s;", name);
    return strstr(faults, word) != NULL;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static real *take(FILE *file, long size) {
    float *raw = malloc(size * sizeof *raw);
    real *to = malloc(size * sizeof *to);
    int brain = fault("bfloat16 weights");
    if (!raw || !to || fread(raw, sizeof *raw, size, file) != (size_t)size) die("weights");
    for (long i = 0; i < size; i++) {
        if (brain) {
            uint32_t bits;
            memcpy(&bits, &raw[i], 4);
            bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
            memcpy(&raw[i], &bits, 4);
        }
        to[i] = raw[i];
    }
    free(raw);
    return to;
}

static void dump(int layer, const char *name, const real *x, int planes, int rows, int columns) {
    char path[4096], shape[128];
    if (layer >= 0) snprintf(path, sizeof path, "%s/%d %s.npy", folder, layer, name);
    else snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    const char *type = sizeof(real) == 8 ? "<f8" : "<f4";
    if (planes) snprintf(shape, sizeof shape, "{'descr': '%s', 'fortran_order': False, 'shape': (%d, %d, %d)}", type, planes, rows, columns);
    else snprintf(shape, sizeof shape, "{'descr': '%s', 'fortran_order': False, 'shape': (%d, %d)}", type, rows, columns);
    FILE *file = fopen(path, "wb");
    if (!file) die(path);
    fprintf(file, "\x93NUMPY\x01%c\x76%c%-117s\n", 0, 0, shape);
    fwrite(x, sizeof(real), (size_t)(planes ? planes : 1) * rows * columns, file);
    fclose(file);
}

static void layernorm(real *out, const real *x, const real *g, const real *b) {
    for (int t = 0; t < T; t++, out += D, x += D) {
        real mean = 0, var = 0;
        if (!fault("rms"))
            for (int i = 0; i < D; i++) mean += x[i] / D;
        for (int i = 0; i < D; i++) var += (x[i] - mean) * (x[i] - mean);
        var /= fault("n - 1") ? D - 1 : D;
        real inverse = 1 / (fault("no root") ? var + (real)1e-5 : sqrt(var + (real)1e-5));
        for (int i = 0; i < D; i++) {
            out[i] = (x[i] - mean) * inverse * g[i];
            if (!fault("no shift")) out[i] += b[i];
        }
    }
}

/* x (T, in) times w (in, out), which is stored as the checkpoint has it: the outputs are the columns. */
static void linear(real *out, const real *x, const real *w, const real *b, int in, int n, int turned) {
    for (int t = 0; t < T; t++)
        for (int o = 0; o < n; o++) {
            real sum = b ? b[o] : 0;
            for (int i = 0; i < in; i++) sum += x[t * in + i] * (turned ? w[o * in + i] : w[i * n + o]);
            out[t * n + o] = sum;
        }
}

static void attend(real *out, real *scores, real *weights, const real *qkv) {
    int K = D / H, first = D / H, step = 1, q0 = 0, k0 = D, v0 = 2 * D;
    if (fault("thirds inside heads")) first = 3 * K, k0 = K, v0 = 2 * K;
    if (fault("strided heads")) first = 1, step = H;
    if (fault("k q v")) q0 = D, k0 = 0;
    if (fault("v at the offset of k")) v0 = k0;
    real scale = 1 / sqrt((real)K);
    if (fault("no scale")) scale = 1;
    if (fault("root of the width")) scale = 1 / sqrt((real)D);
    if (fault("integer division")) scale = 1 / K;
    memset(scores, 0, (size_t)H * T * T * sizeof(real));
    memset(weights, 0, (size_t)H * T * T * sizeof(real));
    for (int h = 0; h < H; h++)
        for (int t = 0; t < T; t++) {
            int seen = fault("sees all") ? T : fault("sees only before") ? t : fault("sees one ahead") ? t + 2 : t + 1;
            if (seen > T) seen = T;
            real *s = scores + (h * T + t) * T, *a = weights + (h * T + t) * T, top = -1e30, sum = 0;
            for (int u = 0; u < seen; u++) {
                const real *q = qkv + t * 3 * D + q0 + h * first, *k = qkv + u * 3 * D + k0 + h * first;
                real dot = 0;
                for (int i = 0; i < K; i++) dot += q[i * step] * k[i * step];
                s[u] = dot * scale;
                if (s[u] > top) top = s[u];
            }
            for (int u = 0; u < seen; u++) sum += a[u] = exp(s[u] - top);
            for (int u = 0; u < seen; u++) a[u] /= sum;
            for (int i = 0; i < K; i++) {
                real value = 0;
                for (int u = 0; u < seen; u++) value += a[u] * qkv[u * 3 * D + v0 + h * first + i * step];
                out[t * D + (fault("strided heads") ? i * H + h : h * K + i)] = value;
            }
        }
}

static void activate(real *out, const real *x, int size) {
    for (int i = 0; i < size; i++) {
        real a = x[i];
        if (fault("silu")) out[i] = a / (1 + exp(-a));
        else out[i] = 0.5 * a * (1 + tanh(sqrt(2 / M_PI) * (a + 0.044715 * a * (fault("cube is a square") ? a : a * a))));
    }
}

static void add(real *x, const real *y, int overwrite, int twice) {
    for (int i = 0; i < T * D; i++) x[i] = overwrite ? y[i] : twice ? 2 * x[i] + y[i] : x[i] + y[i];
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    folder = argv[3], faults = argv[4], L = atoi(argv[5]), H = atoi(argv[6]);
    int ids[4096];
    FILE *text = fopen(argv[2], "r"), *file = fopen(argv[1], "rb");
    if (!text || !file) die("input");
    while (T < 4096 && fscanf(text, "%d", &ids[T]) == 1) T++;
    int32_t header[3];
    if (fread(header, 4, 3, file) != 3) die("header");
    D = header[0], V = header[1];
    real *wte = take(file, (long)V * D), *wpe = take(file, (long)header[2] * D);
    Block *blocks = malloc(L * sizeof *blocks);
    for (int n = 0; n < L; n++) {
        Block *b = &blocks[n];
        b->ln1_g = take(file, D), b->ln1_b = take(file, D);
        b->attn_w = take(file, 3L * D * D), b->attn_b = take(file, 3L * D);
        b->proj_w = take(file, (long)D * D), b->proj_b = take(file, D);
        b->ln2_g = take(file, D), b->ln2_b = take(file, D);
        b->fc_w = take(file, 4L * D * D), b->fc_b = take(file, 4L * D);
        b->down_w = take(file, 4L * D * D), b->down_b = take(file, D);
        if (fault("first layer's weights")) blocks[n] = blocks[0];
        real *swap;
        if (fault("gain and bias exchanged")) {
            swap = b->ln1_g, b->ln1_g = b->ln1_b, b->ln1_b = swap;
            swap = b->ln2_g, b->ln2_g = b->ln2_b, b->ln2_b = swap;
        }
        if (fault("norms exchanged")) {
            swap = b->ln1_g, b->ln1_g = b->ln2_g, b->ln2_g = swap;
            swap = b->ln1_b, b->ln1_b = b->ln2_b, b->ln2_b = swap;
        }
    }
    real *lnf_g = take(file, D), *lnf_b = take(file, D);
    fclose(file), fclose(text);

    size_t TD = (size_t)T * D;
    real *x = malloc(TD * sizeof *x), *normed = malloc(TD * sizeof *x), *mixed = malloc(TD * sizeof *x);
    real *branch = malloc(TD * sizeof *x), *qkv = malloc(3 * TD * sizeof *x), *up = malloc(4 * TD * sizeof *x);
    real *act = malloc(4 * TD * sizeof *x), *logits = malloc((size_t)T * V * sizeof *x);
    real *scores = malloc((size_t)H * T * T * sizeof *x), *weights = malloc((size_t)H * T * T * sizeof *x);

    for (int t = 0; t < T; t++)
        for (int i = 0; i < D; i++) {
            x[t * D + i] = wte[ids[t] * D + i];
            if (!fault("no wpe")) x[t * D + i] += wpe[(t + fault("wpe from 1")) * D + i];
        }
    dump(-1, "x embedded", x, 0, T, D);
    int all = fault("rows are outputs"), depth = L - fault("last layer left out");
    for (int n = 0; n < depth; n++) {
        Block *b = &blocks[n];
        layernorm(normed, x, b->ln1_g, b->ln1_b);
        if (fault("norm in place, attention")) memcpy(x, normed, TD * sizeof *x);
        dump(n, "ln_1", normed, 0, T, D);
        linear(qkv, normed, b->attn_w, fault("no bias of c_attn") ? NULL : b->attn_b, D, 3 * D, all);
        dump(n, "qkv", qkv, 0, T, 3 * D);
        attend(mixed, scores, weights, qkv);
        dump(n, "scores", scores, H, T, T);
        dump(n, "weights", weights, H, T, T);
        dump(n, "mixed", mixed, 0, T, D);
        linear(branch, mixed, b->proj_w, fault("no bias of c_proj") ? NULL : b->proj_b, D, D, all || fault("c_proj rows are outputs"));
        dump(n, "attended", branch, 0, T, D);
        add(x, branch, fault("stream overwritten by attention"), 0);
        dump(n, "middle", x, 0, T, D);
        layernorm(normed, x, b->ln2_g, b->ln2_b);
        if (fault("norm in place, mlp")) memcpy(x, normed, TD * sizeof *x);
        dump(n, "ln_2", normed, 0, T, D);
        linear(up, normed, b->fc_w, b->fc_b, D, 4 * D, all);
        dump(n, "up", up, 0, T, 4 * D);
        activate(act, up, 4 * T * D);
        dump(n, "act", act, 0, T, 4 * D);
        int bare = n == 0 && fault("no bias of the mlp's c_proj, first layer");
        linear(branch, act, b->down_w, bare ? NULL : b->down_b, 4 * D, D, all);
        dump(n, "fed", branch, 0, T, D);
        add(x, branch, fault("stream overwritten by mlp"), fault("stream added twice"));
        dump(n, "result", x, 0, T, D);
    }
    if (fault("last norm is ln_2")) lnf_g = blocks[L - 1].ln2_g, lnf_b = blocks[L - 1].ln2_b;
    if (!fault("no last norm")) layernorm(x, x, lnf_g, lnf_b);
    dump(-1, "x final", x, 0, T, D);
    linear(logits, x, wte, NULL, D, V, 1);
    dump(-1, "logits", logits, 0, T, V);
    return 0;
}
