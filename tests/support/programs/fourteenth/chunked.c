/* GPT-2 in C: a prompt in chunks of CHUNK tokens, then the last SINGLES tokens one by one, with a cache of keys and values.
   Usage: chunked model.bin ids.txt out-folder
   model.bin: int32 layers, heads, context, width, vocabulary; then float32 tensors in the order of the model, matrices (in, out).
   ids.txt: one text a line. Each value of all texts and all calls becomes one .npy. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef REAL real;
enum { CHUNK = 4, SINGLES = 4, MOST_TEXTS = 8, MOST_TOKENS = 256 };

static int n_layer, n_head, n_ctx, D, n_vocab;

static real *zeros(size_t count) {
    real *data = calloc(count, sizeof(real));
    if (!data) exit(1);
    return data;
}

/* ---- weights ---- */

typedef struct {
    real *w, *b;
    int n_in, n_out, step_in, step_out;  // the steps from one input, and from one output, to the next
} dense;

typedef struct {
    real *g, *b;
} norm;

typedef struct {
    norm ln_1, ln_2;
    dense attn, attn_out, fc, mlp_out;
} block;

static real *wte, *wpe;
static block *blocks;
static norm ln_f;

static real *read_reals(FILE *file, size_t count) {
    real *data = zeros(count);
    for (size_t i = 0; i < count; i++) {
        float number;
        if (fread(&number, 4, 1, file) != 1) exit(1);
        data[i] = number;
    }
    return data;
}

static norm read_norm(FILE *file) {
    real *g = read_reals(file, D);
    return (norm){g, read_reals(file, D)};
}

static dense read_dense(FILE *file, int n_in, int n_out) {
    real *w = read_reals(file, (size_t)n_in * n_out);
    return (dense){w, read_reals(file, n_out), n_in, n_out, n_out, 1};
}

static void load(FILE *file) {
    int32_t sizes[5];
    if (fread(sizes, 4, 5, file) != 5) exit(1);
    n_layer = sizes[0], n_head = sizes[1], n_ctx = sizes[2], D = sizes[3], n_vocab = sizes[4];
    wte = read_reals(file, (size_t)n_vocab * D), wpe = read_reals(file, (size_t)n_ctx * D);
    blocks = calloc(n_layer, sizeof *blocks);
    for (int n = 0; n < n_layer; n++) {
        block *l = &blocks[n];
        l->ln_1 = read_norm(file);
        l->attn = read_dense(file, D, 3 * D);
        l->attn_out = read_dense(file, D, D);
        l->ln_2 = read_norm(file);
        l->fc = read_dense(file, D, 4 * D);
        l->mlp_out = read_dense(file, 4 * D, D);
    }
    ln_f = read_norm(file);
}

/* ---- what is shown ---- */

typedef struct {
    char name[32];
    int heads, width;  // (texts, tokens, width), or (texts, heads, tokens, width) if heads is not 0
    real *data;
} shown;

static shown all_shown[512];
static int n_shown, texts[MOST_TEXTS][MOST_TOKENS], n_texts, n_tokens, text, first;  // `first`: of this call, in its text

// A row of `count` numbers for token i of this call. Whatever lies outside the text is not shown.
static void show(const char *part, int n, int head, int heads, int i, const real *row, int count, int width) {
    char name[32];
    if (n < 0) snprintf(name, sizeof name, "%s", part);
    else snprintf(name, sizeof name, "%d %s", n, part);
    int s = 0, many = heads ? heads : 1;
    while (s < n_shown && strcmp(all_shown[s].name, name)) s++;
    if (s == n_shown) {
        if (n_shown++ == 512) exit(1);
        all_shown[s] = (shown){.heads = heads, .width = width, .data = zeros((size_t)n_texts * many * n_tokens * width)};
        strcpy(all_shown[s].name, name);
    }
    if (first + i >= n_tokens) return;
    real *place = all_shown[s].data + (((size_t)text * many + head) * n_tokens + first + i) * width;
    memcpy(place, row, (count < width ? count : width) * sizeof(real));
}

static real *show_rows(const char *part, int n, real *rows, int N, int width) {
    for (int i = 0; i < N; i++) show(part, n, 0, 0, i, rows + (size_t)i * width, width, width);
    return rows;
}

static void write_all(const char *folder) {
    for (int s = 0; s < n_shown; s++) {
        char path[4096], header[128], heads[16] = "";
        if (all_shown[s].heads) snprintf(heads, sizeof heads, "%d, ", all_shown[s].heads);
        snprintf(path, sizeof path, "%s/%s.npy", folder, all_shown[s].name);
        snprintf(header, sizeof header, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%d, %s%d, %d), }",
                 (int)sizeof(real), n_texts, heads, n_tokens, all_shown[s].width);
        size_t count = (size_t)n_texts * (all_shown[s].heads ? all_shown[s].heads : 1) * n_tokens * all_shown[s].width;
        FILE *file = fopen(path, "wb");
        if (!file) exit(1);
        fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
        fprintf(file, "%-117s\n", header);
        fwrite(all_shown[s].data, sizeof(real), count, file);
        fclose(file);
    }
}

/* ---- layers, on N rows ---- */

static real *linear(const real *x, int N, dense m, const real *bias) {
    real *out = zeros((size_t)N * m.n_out);
    for (int i = 0; i < N; i++)
        for (int o = 0; o < m.n_out; o++) {
            real sum = bias[o];
            for (int u = 0; u < m.n_in; u++) sum += x[i * m.n_in + u] * m.w[u * m.step_in + o * m.step_out];
            out[i * m.n_out + o] = sum;
        }
    return out;
}

static real *layer_norm(const real *x, int N, norm p) {
    real *out = zeros((size_t)N * D);
    for (int i = 0; i < N; i++) {
        const real *row = x + i * D;
        real mean = 0, var = 0;
        for (int u = 0; u < D; u++) mean += row[u] / D;
        for (int u = 0; u < D; u++) var += (row[u] - mean) * (row[u] - mean) / D;
        for (int u = 0; u < D; u++) out[i * D + u] = (row[u] - mean) / sqrt(var + 1e-5) * p.g[u] + p.b[u];
    }
    return out;
}

static real gelu(real x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

static void add(real *x, const real *branch, int N) {
    for (int i = 0; i < N * D; i++) x[i] += branch[i];
}

/* ---- the cache: (layer, slot, width) ---- */

static real *cached_k, *cached_v;
static int n_past;

static void empty_cache(void) {
    n_past = 0;
    memset(cached_k, 0, (size_t)n_layer * n_ctx * D * sizeof(real));
    memset(cached_v, 0, (size_t)n_layer * n_ctx * D * sizeof(real));
}

static real *attention(int n, const real *qkv, int N) {
    int size = D / n_head;
    real *keys = cached_k + (size_t)n * n_ctx * D, *values = cached_v + (size_t)n * n_ctx * D;
    for (int i = 0; i < N; i++) {
        int slot = n_past + i;
        memcpy(keys + slot * D, qkv + i * 3 * D + D, D * sizeof(real));
        memcpy(values + slot * D, qkv + i * 3 * D + 2 * D, D * sizeof(real));
    }
    real *out = zeros((size_t)N * D), *score = zeros(n_ctx), *prob = zeros(n_ctx), *q = zeros(size);
    for (int i = 0; i < N; i++)
        for (int h = 0; h < n_head; h++) {
            int count = n_past + i + 1;
            for (int u = 0; u < size; u++) q[u] = qkv[i * 3 * D + h * size + u] / sqrt(size);
            real most = -INFINITY, total = 0;
            for (int j = 0; j < count; j++) {
                real sum = 0;
                for (int u = 0; u < size; u++) sum += q[u] * keys[j * D + h * size + u];
                score[j] = sum;
                most = fmax(most, score[j]);
            }
            for (int j = 0; j < count; j++) total += prob[j] = exp(score[j] - most);
            for (int j = 0; j < count; j++) {
                prob[j] /= total;
                for (int u = 0; u < size; u++) out[i * D + h * size + u] += prob[j] * values[j * D + h * size + u];
            }
            show("dots", n, h, n_head, i, score, count, n_tokens);
            show("probs", n, h, n_head, i, prob, count, n_tokens);
        }
    return out;
}

/* ---- one call: N tokens that follow what the cache holds ---- */

static void forward(const int *ids, int N) {
    real *x = zeros((size_t)N * D);
    for (int i = 0; i < N; i++)
        for (int u = 0; u < D; u++) {
            int position = n_past + i;
            x[i * D + u] = wte[ids[i] * D + u] + wpe[position * D + u];
        }
    show_rows("x in", -1, x, N, D);
    for (int n = 0; n < n_layer; n++) {
        const block *l = &blocks[n];
        real *norm_a = show_rows("norm_a", n, layer_norm(x, N, l->ln_1), N, D);
        real *qkv = show_rows("qkv", n, linear(norm_a, N, l->attn, l->attn.b), N, 3 * D);
        real *blend = show_rows("blend", n, attention(n, qkv, N), N, D);
        real *attn_out = show_rows("attn_out", n, linear(blend, N, l->attn_out, l->attn_out.b), N, D);
        add(x, attn_out, N);
        show_rows("mid", n, x, N, D);
        real *norm_m = show_rows("norm_m", n, layer_norm(x, N, l->ln_2), N, D);
        real *fc = show_rows("fc", n, linear(norm_m, N, l->fc, l->fc.b), N, 4 * D);
        for (int i = 0; i < N * 4 * D; i++) fc[i] = gelu(fc[i]);
        show_rows("fc_act", n, fc, N, 4 * D);
        real *mlp_out = show_rows("mlp_out", n, linear(fc, N, l->mlp_out, l->mlp_out.b), N, D);
        add(x, mlp_out, N);
        show_rows("out", n, x, N, D);
    }
    n_past += N;
    real *last = layer_norm(x, N, ln_f);
    show_rows("x last", -1, last, N, D);
    real *logits = zeros((size_t)N * n_vocab);
    for (int i = 0; i < N; i++)
        for (int t = 0; t < n_vocab; t++)
            for (int u = 0; u < D; u++) logits[i * n_vocab + t] += last[i * D + u] * wte[t * D + u];
    show_rows("logits", -1, logits, N, n_vocab);
}

static void read_text(const int *ids) {
    int prompt = n_tokens - SINGLES;
    for (first = 0; first < prompt; first += CHUNK) {
        int N = prompt - first < CHUNK ? prompt - first : CHUNK;
        forward(ids + first, N);
    }
    for (first = prompt; first < n_tokens; first++) forward(ids + first, 1);
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    FILE *weights = fopen(argv[1], "rb"), *lines = fopen(argv[2], "r");
    if (!weights || !lines) return 1;
    load(weights);
    char line[16384];
    while (n_texts < MOST_TEXTS && fgets(line, sizeof line, lines)) {
        n_tokens = 0;
        for (char *word = strtok(line, " \n"); word && n_tokens < MOST_TOKENS; word = strtok(NULL, " \n"))
            texts[n_texts][n_tokens++] = atoi(word);
        n_texts += n_tokens > 0;
    }
    cached_k = zeros((size_t)n_layer * n_ctx * D), cached_v = zeros((size_t)n_layer * n_ctx * D);
    for (text = 0; text < n_texts; text++) {
        empty_cache();
        read_text(texts[text]);
    }
    write_all(argv[3]);
    return 0;
}
