// GPT-2 as a small inference engine: one token a step, a key/value cache, flat buffers. engine MODEL.safetensors IDS OUT FAULTS L H CTX
// Compiled with -DREAL=float or double. IDS is one line of numbers. OUT is a folder of .npy files. Mistakes: see SOURCES.md.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif
typedef REAL real;

static const char *faults;
static int on(const char *name) {  // faults are ";one;another;"
    char key[64];
    snprintf(key, sizeof key, ";%s;", name);
    return strstr(faults, key) != NULL;
}

static char *header;
static const char *blob;
static int C, NH, L, V, CTX, T;

static real *tensor(const char *name, long *count) {  // a copy of one tensor, from safetensors' header
    char key[96];
    long begin, end;
    snprintf(key, sizeof key, "\"%s\":", name);
    char *at = strstr(header, key);
    if (!at || !(at = strstr(at, "data_offsets"))) { fprintf(stderr, "no %s\n", name); exit(1); }
    if (sscanf(strchr(at, '['), "[%ld,%ld]", &begin, &end) != 2) exit(1);
    *count = (end - begin) / 4;
    real *out = malloc(*count * sizeof(real));
    for (long i = 0; i < *count; i++) {
        float value;
        memcpy(&value, blob + begin + 4 * i, 4);
        out[i] = value;
    }
    return out;
}

static real *of_layer(int l, const char *leaf) {
    char name[96];
    long count;
    snprintf(name, sizeof name, "h.%d.%s", l, leaf);
    return tensor(name, &count);
}

static float half(float value) {  // rounded to float16 and back; no subnormal numbers
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu;
    memcpy(&value, &bits, 4);
    return fabsf(value) < 6e-8f ? 0 : value;
}

static void int8_rows(real *w, int rows, int columns, int wrong) {  // a scale for each column (output), or the row's by mistake
    real *scale = malloc(columns * sizeof(real));
    for (int j = 0; j < columns; j++) {
        real most = 0;
        for (int i = 0; i < rows; i++) most = fabs(w[i * columns + j]) > most ? fabs(w[i * columns + j]) : most;
        scale[j] = most / 127;
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) w[i * columns + j] = round(w[i * columns + j] / scale[j]) * scale[wrong ? i : j];
    free(scale);
}

typedef struct { real *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb, *ln2w, *ln2b, *fcw, *fcb, *outw, *outb; } Layer;

static void norm(real *out, real *x, const real *w, const real *b) {
    real mean = 0, var = 0;
    if (!on("rms without bias"))
        for (int i = 0; i < C; i++) mean += x[i] / C;
    for (int i = 0; i < C; i++) var += (x[i] - mean) * (x[i] - mean);
    var /= on("unbiased variance") ? C - 1 : C;
    real scale = 1 / sqrt(var + (on("eps 1e-12") ? 1e-12 : 1e-5));
    int bias = !on("norms without bias") && !on("rms without bias");
    for (int i = 0; i < C; i++) {
        real n = (x[i] - mean) * scale;
        out[i] = n * w[i] + (bias ? b[i] : 0);
        if (on("norm in place")) x[i] = n;
    }
}

static void matvec(real *out, const real *x, const real *w, const real *b, int in, int n, int as_linear) {
    for (int j = 0; j < n; j++) {
        real sum = b ? b[j] : 0;
        for (int i = 0; i < in; i++) sum += x[i] * (as_linear ? w[(long)j * in + i] : w[(long)i * n + j]);
        out[j] = sum;
    }
}

static real gelu(real x) {
    if (on("exact gelu")) return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    if (on("silu")) return x / (1 + exp(-x));
    real root = on("root of two over pi") ? sqrt(2.0) / M_PI : sqrt(2.0 / M_PI);
    if (on("table of halves")) x = half(x);
    real y = 0.5 * x * (1 + tanh(root * (x + 0.044715 * x * x * x)));
    return on("table of halves") ? half(y) : y;
}

static const char *folder;
static void dump(const char *name, const real *data, int d0, int d1, int d2) {
    char path[4096], shape[160];
    snprintf(path, sizeof path, "%s/%s.npy", folder, name);
    char sizes[64];
    if (d2) snprintf(sizes, sizeof sizes, "%d, %d, %d", d0, d1, d2);
    else snprintf(sizes, sizeof sizes, "%d, %d", d0, d1);
    snprintf(shape, sizeof shape, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%s)}", (int)sizeof(real), sizes);
    FILE *file = fopen(path, "wb");
    if (!file) { perror(path); exit(1); }
    fprintf(file, "\x93NUMPY\x01%c\x76%c%-117s\n", 0, 0, shape);
    fwrite(data, sizeof(real), (size_t)d0 * d1 * (d2 ? d2 : 1), file);
    fclose(file);
}

enum { LN1, QKV, ATT, MIXED, ATTENDED, MIDDLE, LN2, UP, ACT, FED, RESULT, KINDS };
static const char *KIND[] = {"ln_1", "qkv", "weights", "mixed", "attended", "middle", "ln_2", "up", "act", "fed", "result"};

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    FILE *file = fopen(argv[1], "rb");
    uint64_t size;
    if (!file || fread(&size, 8, 1, file) != 1) return 1;
    header = calloc(size + 1, 1);
    if (fread(header, 1, size, file) != size) return 1;
    long start = ftell(file);
    fseek(file, 0, SEEK_END);
    long rest = ftell(file) - start;
    fseek(file, start, SEEK_SET);
    char *bytes = malloc(rest);
    if (fread(bytes, 1, rest, file) != (size_t)rest) return 1;
    fclose(file);
    blob = bytes, faults = argv[4], folder = argv[3], L = atoi(argv[5]), NH = atoi(argv[6]), CTX = atoi(argv[7]);
    int ids[4096];
    FILE *text = fopen(argv[2], "r");
    while (text && fscanf(text, "%d", &ids[T]) == 1) T++;
    long count;
    real *wpe = tensor("wpe.weight", &count);
    C = count / CTX;
    real *wte = tensor("wte.weight", &count), *lnfw, *lnfb;
    V = count / C;
    lnfw = tensor("ln_f.weight", &count), lnfb = tensor("ln_f.bias", &count);
    if (on("fewer heads")) NH -= 1;  // a constant of another model's size
    Layer *layers = malloc(L * sizeof(Layer));
    for (int l = 0; l < L; l++) {
        Layer *p = &layers[l];
        *p = (Layer){of_layer(l, "ln_1.weight"), of_layer(l, "ln_1.bias"), of_layer(l, "attn.c_attn.weight"),
                     of_layer(l, "attn.c_attn.bias"), of_layer(l, "attn.c_proj.weight"), of_layer(l, "attn.c_proj.bias"),
                     of_layer(l, "ln_2.weight"), of_layer(l, "ln_2.bias"), of_layer(l, "mlp.c_fc.weight"),
                     of_layer(l, "mlp.c_fc.bias"), of_layer(l, "mlp.c_proj.weight"), of_layer(l, "mlp.c_proj.bias")};
        if (on("one norm for both")) p->ln2w = p->ln1w, p->ln2b = p->ln1b;
        if (on("int8 weights") || on("scales of the wrong axis")) int8_rows(p->projw, C, C, on("scales of the wrong axis"));
        if (on("int8 weights")) int8_rows(p->fcw, C, 4 * C, 0), int8_rows(p->outw, 4 * C, C, 0);
        if (on("thirds by rows")) {  // the flat matrix cut into three
            real *whole = p->qkvw;
            p->qkvw = malloc(3L * C * C * sizeof(real));
            for (int third = 0; third < 3; third++)
                for (int i = 0; i < C; i++)
                    for (int j = 0; j < C; j++)
                        p->qkvw[(long)i * 3 * C + third * C + j] = whole[(long)third * C * C + (long)i * C + j];
        }
    }
    int hs = C / NH, P = T / 2;  // the first P tokens are the prompt
    long wide[KINDS];
    for (int k = 0; k < KINDS; k++) wide[k] = k == QKV ? 3 * C : k == ATT ? NH * T : k == UP || k == ACT ? 4 * C : C;
    real *kept[KINDS];
    for (int k = 0; k < KINDS; k++) kept[k] = calloc((size_t)L * T * wide[k], sizeof(real));
    real *embedded = malloc((size_t)T * C * sizeof(real)), *final = malloc((size_t)T * C * sizeof(real));
    real *logits = malloc((size_t)T * V * sizeof(real)), *x = malloc(C * sizeof(real));
    real *kcache = calloc((size_t)L * T * C, sizeof(real)), *vcache = calloc((size_t)L * T * C, sizeof(real));
    int whole_prompt = on("prompt sees everything");
    real *stream = malloc((size_t)T * C * sizeof(real));
    for (int t = 0; t < T; t++) {
        int pos = t;
        if (on("positions from 2")) pos = t + 2;
        if (on("steps at position 0") && t >= P) pos = 0;
        if (on("prompt counted twice") && t > P) pos = t + P - 1;
        if (on("steps at number of heads") && t >= P) pos = NH;
        if (pos >= CTX) pos = CTX - 1;
        int without = on("steps without position") && t >= P;
        for (int i = 0; i < C; i++) stream[t * C + i] = wte[(long)ids[t] * C + i] + (without ? 0 : wpe[(long)pos * C + i]);
    }
    memcpy(embedded, stream, (size_t)T * C * sizeof(real));
    for (int l = 0; l < L; l++) {  // a block at a time over all steps gives the same as a step at a time over all blocks
        Layer *p = &layers[l];
        real *kc = kcache + (size_t)l * T * C, *vc = vcache + (size_t)l * T * C;
        if (on("one cache for keys and values")) vc = kc;  // so values overwrite the keys
        int first = whole_prompt ? 0 : T;
        for (int t = 0; t < T; t++) {
            real *row[KINDS];
            for (int k = 0; k < KINDS; k++) row[k] = kept[k] + ((size_t)l * T + t) * wide[k];
            memcpy(x, stream + t * C, C * sizeof(real));
            if (whole_prompt && first == 0) {  // keys and values of the whole prompt first
                for (int s = 0; s < P; s++) {
                    norm(row[LN1], stream + s * C, p->ln1w, p->ln1b);
                    matvec(row[QKV], row[LN1], p->qkvw, p->qkvb, C, 3 * C, 0);
                    memcpy(kc + s * C, row[QKV] + C, C * sizeof(real)), memcpy(vc + s * C, row[QKV] + 2 * C, C * sizeof(real));
                }
                first = T;
            }
            norm(row[LN1], x, p->ln1w, p->ln1b);
            matvec(row[QKV], row[LN1], p->qkvw, p->qkvb, C, 3 * C, on("kernels as linear"));
            const real *q = row[QKV];
            for (int i = 0; i < C; i++) {
                kc[t * C + i] = on("half cache") ? half(row[QKV][C + i]) : row[QKV][C + i];
                vc[t * C + i] = on("half cache") ? half(row[QKV][2 * C + i]) : row[QKV][2 * C + i];
            }
            int heads = on("one head") ? 1 : NH, wh = C / heads;
            int until = whole_prompt && t < P ? P : t + 1, from = 0;
            if (on("window in odd blocks") && l % 2 && t - 3 > 0) from = t - 3;
            real divisor = sqrt(on("scaled by width") ? C : on("scaled by number of heads") ? NH : hs);
            if (on("divided by the block's number")) divisor *= l + 1;
            for (int h = 0; h < heads; h++) {
                real *att = row[ATT] + h * T, most = -1e30, sum = 0;
                for (int s = from; s < until; s++) {
                    real score = 0;
                    for (int i = 0; i < wh; i++) score += q[h * wh + i] * kc[s * C + h * wh + i];
                    att[s] = score / divisor;
                    if (att[s] > most) most = att[s];
                }
                for (int s = from; s < until; s++) sum += att[s] = exp(att[s] - most);
                if (on("softmax plus one")) sum += exp(-most);
                for (int s = from; s < until; s++) att[s] /= sum;
                for (int i = 0; i < wh; i++) row[MIXED][h * wh + i] = 0;
                for (int s = from; s < until; s++)
                    for (int i = 0; i < wh; i++) {
                        int j = h * wh + i;
                        real value = vc[on("values read features first") ? j * T + s : s * C + j];
                        if (on("assigned, not added")) row[MIXED][j] = att[s] * value;
                        else row[MIXED][j] += att[s] * value;
                    }
            }
            real *projected = row[ATTENDED];
            if (on("no output projection")) memcpy(projected, row[MIXED], C * sizeof(real));
            else matvec(projected, row[MIXED], p->projw, on("no projection bias") ? NULL : p->projb, C, C, on("kernels as linear"));
            for (int i = 0; i < C; i++) row[MIDDLE][i] = x[i] + (on("attention not used") ? 0 : projected[i]);
            memcpy(x, row[MIDDLE], C * sizeof(real));
            norm(row[LN2], x, p->ln2w, p->ln2b);
            int linear = on("kernels as linear"), bias = !on("no feed-forward bias");
            matvec(row[UP], row[LN2], p->fcw, bias ? p->fcb : NULL, C, 4 * C, linear);
            for (int i = 0; i < 4 * C; i++) row[ACT][i] = gelu(row[UP][i]);
            matvec(row[FED], row[ACT], p->outw, bias ? p->outb : NULL, 4 * C, C, linear);
            for (int i = 0; i < C; i++) row[RESULT][i] = x[i] + row[FED][i];
        }
        memcpy(stream, kept[RESULT] + (size_t)l * T * C, (size_t)T * C * sizeof(real));
    }
    for (int t = 0; t < T; t++) {
        norm(final + t * C, stream + t * C, lnfw, lnfb);
        for (int v = 0; v < V; v++) {
            real sum = 0;
            for (int i = 0; i < C; i++) sum += final[t * C + i] * wte[(long)v * C + i];
            logits[(long)t * V + v] = on("logits over root") ? sum / sqrt((real)C) : sum;
        }
    }
    char name[64];
    for (int l = 0; l < L; l++)
        for (int k = 0; k < KINDS; k++) {
            snprintf(name, sizeof name, "%d %s", l, KIND[k]);
            const real *data = kept[k] + (size_t)l * T * wide[k];
            if (k == ATT) dump(name, data, T, NH, T);
            else dump(name, data, T, wide[k], 0);
        }
    for (int l = 0; l < L; l++) {
        snprintf(name, sizeof name, "%d keys", l), dump(name, kcache + (size_t)l * T * C, T, NH, hs);
    }
    dump("x embedded", embedded, T, C, 0), dump("x final", final, T, C, 0), dump("logits", logits, T, V, 0);
    return 0;
}
