/* GPT-2 in C in the manner of llama2.c's run.c: one token at a time, a state of small buffers, caches of keys and values.
   Usage: runner weights.bin ids.txt out-folder ";fault;fault;" layers heads context
   weights.bin: int32 dim and vocab_size; then float32 tensors in the order of the model, matrices (in, out) as GPT-2 has them;
   read_weights turns them to (out, in) and cuts c_attn into wq, wk and wv. */
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
    int dim, hidden_dim, n_layers, n_heads, vocab_size, seq_len;
} Config;

typedef struct {
    real *token_embedding, *position_embedding;
    real *ln1, *ln1_bias, *ln2, *ln2_bias;              // (layer, dim)
    real *wq, *wk, *wv, *wo, *bq, *bk, *bv, *bo;        // (layer, dim, dim) and (layer, dim)
    real *w1, *b1, *w2, *b2;                            // (layer, hidden_dim, dim), (layer, dim, hidden_dim) and their biases
    real *ln_final, *ln_final_bias;
} Weights;

typedef struct {
    real *x, *xb, *xb2, *q, *k, *v, *hb, *att, *logits, *probs;
    real *key_cache, *value_cache;  // (layer, seq_len, dim)
} RunState;

/* ---- what is shown: each value of all tokens as one .npy ---- */

typedef struct {
    char name[32];
    int sizes[2];  // of one token; the second is 0 for a vector
    real *data;
} Trace;

static Trace traces[1024];
static int n_traces, n_tokens;

static real *trace_at(const char *part, int layer, int pos, int size, int second) {
    char name[32];
    if (layer < 0) snprintf(name, sizeof name, "%s", part);
    else snprintf(name, sizeof name, "%d %s", layer, part);
    int n = 0, each = second ? size * second : size;
    while (n < n_traces && strcmp(traces[n].name, name)) n++;
    if (n == n_traces) {
        if (n_traces++ == 1024) exit(1);
        strcpy(traces[n].name, name);
        traces[n].sizes[0] = size, traces[n].sizes[1] = second;
        traces[n].data = zeros((size_t)n_tokens * each);
    }
    return traces[n].data + (size_t)pos * each;
}

static void trace(const char *part, int layer, int pos, const real *values, int size) {
    memcpy(trace_at(part, layer, pos, size, 0), values, size * sizeof(real));
}

static void trace_row(const char *part, int layer, int pos, int head, int n_heads, const real *row, int size) {
    memcpy(trace_at(part, layer, pos, n_heads, n_tokens) + head * n_tokens, row, size * sizeof(real));
}

static void write_traces(const char *folder) {
    for (int n = 0; n < n_traces; n++) {
        char path[4096], header[128], shape[64];
        int size = traces[n].sizes[0], second = traces[n].sizes[1];
        if (second) snprintf(shape, sizeof shape, "%d, %d, %d", n_tokens, size, second);
        else snprintf(shape, sizeof shape, "%d, %d", n_tokens, size);
        snprintf(path, sizeof path, "%s/%s.npy", folder, traces[n].name);
        int length = snprintf(header, sizeof header, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%s), }",
                              (int)sizeof(real), shape);
        memset(header + length, ' ', 118 - length);
        header[117] = '\n';
        FILE *file = fopen(path, "wb");
        if (!file) exit(1);
        fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
        fwrite(header, 1, 118, file);
        fwrite(traces[n].data, sizeof(real), (size_t)n_tokens * size * (second ? second : 1), file);
        fclose(file);
    }
}

/* ---- weights ---- */

static void read_reals(FILE *file, real *into, size_t count) {
    float number;
    for (size_t i = 0; i < count; i++) {
        if (fread(&number, 4, 1, file) != 1) exit(1);
        into[i] = number;
    }
}

static void read_matrix(FILE *file, real *into, int in, int out, int turn) {
    size_t count = (size_t)in * out;
    if (!turn || fault("no matrix turned")) {
        read_reals(file, into, count);
        return;
    }
    real *as_saved = zeros(count);
    read_reals(file, as_saved, count);
    for (int i = 0; i < in; i++)
        for (int o = 0; o < out; o++) into[(size_t)o * in + i] = as_saved[(size_t)i * out + o];
    free(as_saved);
}

// Copy the rows of c_attn (3 * dim, each of `each` numbers) of one third, all heads' one after the other.
static void take_third(real *into, const real *c_attn, int third, const Config *p, int each) {
    int head_size = p->dim / p->n_heads;
    if (fault("k at 2 * dim")) third = third == 1 ? 2 : third == 2 ? 1 : 0;  // and v at dim
    for (int i = 0; i < p->dim; i++) {
        int row = third * p->dim + i;
        if (fault("q, k, v inside each head")) row = i / head_size * 3 * head_size + third * head_size + i % head_size;
        memcpy(into + (size_t)i * each, c_attn + (size_t)row * each, each * sizeof(real));
    }
}

static Weights read_weights(FILE *file, const Config *p) {
    Weights w;
    int dim = p->dim, hidden_dim = p->hidden_dim, L = p->n_layers;
    size_t square = (size_t)dim * dim, wide = (size_t)dim * hidden_dim;
    real **vectors[] = {&w.ln1, &w.ln1_bias, &w.ln2, &w.ln2_bias, &w.bq, &w.bk, &w.bv, &w.bo, &w.b2};
    for (int n = 0; n < 9; n++) *vectors[n] = zeros((size_t)L * dim);
    real **squares[] = {&w.wq, &w.wk, &w.wv, &w.wo};
    for (int n = 0; n < 4; n++) *squares[n] = zeros(L * square);
    w.w1 = zeros(L * wide), w.w2 = zeros(L * wide), w.b1 = zeros((size_t)L * hidden_dim);
    w.token_embedding = zeros((size_t)p->vocab_size * dim), w.position_embedding = zeros((size_t)p->seq_len * dim);
    w.ln_final = zeros(dim), w.ln_final_bias = zeros(dim);
    real *c_attn = zeros(3 * square), *c_attn_bias = zeros(3 * (size_t)dim);

    read_reals(file, w.token_embedding, (size_t)p->vocab_size * dim);
    read_reals(file, w.position_embedding, (size_t)p->seq_len * dim);
    for (int l = 0; l < L; l++) {
        read_reals(file, w.ln1 + l * dim, dim);
        read_reals(file, w.ln1_bias + l * dim, dim);
        read_matrix(file, c_attn, dim, 3 * dim, 1);
        read_reals(file, c_attn_bias, 3 * dim);
        real *thirds[] = {w.wq, w.wk, w.wv}, *biases[] = {w.bq, w.bk, w.bv};
        for (int third = 0; third < 3; third++) {
            take_third(thirds[third] + l * square, c_attn, third, p, dim);
            take_third(biases[third] + l * dim, c_attn_bias, third, p, 1);
        }
        read_matrix(file, w.wo + l * square, dim, dim, !fault("wo not turned"));
        read_reals(file, w.bo + l * dim, dim);
        read_reals(file, w.ln2 + l * dim, dim);
        read_reals(file, w.ln2_bias + l * dim, dim);
        read_matrix(file, w.w1 + l * wide, dim, hidden_dim, 1);
        read_reals(file, w.b1 + l * hidden_dim, hidden_dim);
        read_matrix(file, w.w2 + l * wide, hidden_dim, dim, 1);
        read_reals(file, w.b2 + l * dim, dim);
    }
    read_reals(file, w.ln_final, dim);
    read_reals(file, w.ln_final_bias, dim);
    free(c_attn), free(c_attn_bias);
    return w;
}

static RunState malloc_run_state(const Config *p) {
    RunState s;
    size_t dim = p->dim, cache = (size_t)p->n_layers * p->seq_len * dim;
    s.x = zeros(dim), s.xb = zeros(dim), s.xb2 = zeros(dim), s.q = zeros(dim), s.k = zeros(dim), s.v = zeros(dim);
    s.hb = zeros(p->hidden_dim), s.att = zeros((size_t)p->n_heads * p->seq_len);
    s.logits = zeros(p->vocab_size), s.probs = zeros(p->vocab_size);
    s.key_cache = zeros(cache), s.value_cache = zeros(cache);
    return s;
}

/* ---- the blocks of the net ---- */

static void layernorm(real *o, const real *x, const real *weight, const real *bias, int size) {
    real mean = 0, ss = 0;
    for (int j = 0; j < size; j++) mean += x[j];
    mean /= size;
    if (fault("rmsnorm kept")) mean = 0;
    for (int j = 0; j < size; j++) ss += (x[j] - mean) * (x[j] - mean);
    ss = 1 / sqrt(ss / size + 1e-5);
    for (int j = 0; j < size; j++) o[j] = weight[j] * (ss * (x[j] - mean)) + (fault("norm without bias") ? 0 : bias[j]);
}

static void softmax(real *x, int size) {
    real max_val = -1e30, sum = 0;
    for (int i = 0; i < size; i++) max_val = x[i] > max_val ? x[i] : max_val;
    for (int i = 0; i < size; i++) sum += x[i] = exp(x[i] - max_val);
    for (int i = 0; i < size; i++) x[i] /= sum;
}

static void matmul(real *xout, const real *x, const real *w, const real *b, int n, int d) {  // (d, n) @ (n,) -> (d,)
    for (int i = 0; i < d; i++) {
        real val = 0;
        for (int j = 0; j < n; j++) val += w[(size_t)i * n + j] * x[j];
        xout[i] = b && !fault("matmul without bias") ? val + b[i] : val;
    }
}

static void rope(real *q, real *k, int pos, int dim, int head_size) {
    for (int i = 0; i < dim; i += 2) {
        real angle = pos / pow(10000, (i % head_size) / (real)head_size), fcr = cos(angle), fci = sin(angle);
        for (int v = 0; v < 2; v++) {
            real *vec = v == 0 ? q : k, v0 = vec[i], v1 = vec[i + 1];
            vec[i] = v0 * fcr - v1 * fci, vec[i + 1] = v0 * fci + v1 * fcr;
        }
    }
}

static void attention(const Config *p, RunState *s, int l, int loff, int pos) {
    int dim = p->dim, head_size = dim / p->n_heads, keys = fault("t < pos") ? pos : pos + 1;
    for (int h = 0; h < p->n_heads; h++) {
        real *q = s->q + h * head_size, *att = s->att + h * p->seq_len, *xb = s->xb + h * head_size;
        for (int t = 0; t < keys; t++) {
            real *k = s->key_cache + loff + t * dim + (fault("keys without h * head_size") ? 0 : h * head_size);
            real score = 0;
            for (int i = 0; i < head_size; i++) score += q[i] * k[i];
            if (fault("sqrt(dim)")) score /= sqrt(dim);
            else if (fault("score / head_size")) score /= head_size;
            else if (!fault("no scale")) score /= sqrt(head_size);
            att[t] = score;
        }
        trace_row("score", l, pos, h, p->n_heads, att, keys);
        softmax(att, keys);
        trace_row("att", l, pos, h, p->n_heads, att, keys);
        memset(xb, 0, head_size * sizeof(real));
        for (int t = 0; t < keys; t++) {
            real *v = (fault("values from key_cache") ? s->key_cache : s->value_cache) + loff + t * dim + h * head_size;
            for (int i = 0; i < head_size; i++) xb[i] += att[t] * v[i];
        }
    }
}

static real *forward(const Config *p, const Weights *w, RunState *s, int token, int pos) {
    int dim = p->dim, hidden_dim = p->hidden_dim, head_size = dim / p->n_heads;
    size_t square = (size_t)dim * dim, wide = (size_t)dim * hidden_dim;
    real *x = s->x, *normed = fault("norm into x") ? s->x : s->xb;
    const real *position = w->position_embedding + (fault("pos + 1") ? pos + 1 : pos) * dim;
    memcpy(x, w->token_embedding + (size_t)token * dim, dim * sizeof(real));
    for (int i = 0; i < dim && !fault("no wpe"); i++) x[i] += position[i];
    trace("x emb", -1, pos, x, dim);
    for (int l = 0; l < p->n_layers; l++) {
        int norms = fault("norm's weights without l * dim") ? 0 : l * dim;
        layernorm(normed, x, w->ln1 + norms, w->ln1_bias + norms, dim);
        trace("xb", l, pos, normed, dim);
        matmul(s->q, normed, w->wq + l * square, w->bq + l * dim, dim, dim);
        matmul(s->k, normed, w->wk + l * square, w->bk + l * dim, dim, dim);
        matmul(s->v, normed, w->wv + l * square, w->bv + l * dim, dim, dim);
        if (fault("rope kept")) rope(s->q, s->k, pos, dim, head_size);
        trace("q", l, pos, s->q, dim), trace("k", l, pos, s->k, dim), trace("v", l, pos, s->v, dim);

        int loff = l * p->seq_len * dim;
        if (fault("caches without loff")) loff = 0;
        if (fault("loff without seq_len")) loff = l * dim;
        memcpy(s->key_cache + loff + pos * dim, s->k, dim * sizeof(real));
        memcpy(s->value_cache + loff + pos * dim, s->v, dim * sizeof(real));
        attention(p, s, l, loff, pos);
        trace("xb att", l, pos, s->xb, dim);
        matmul(s->xb2, s->xb, w->wo + l * square, w->bo + l * dim, dim, dim);
        trace("xb2", l, pos, s->xb2, dim);
        for (int i = 0; i < dim; i++) x[i] += fault("x += xb") ? s->xb[i] : s->xb2[i];
        trace("x att", l, pos, x, dim);

        layernorm(normed, x, w->ln2 + norms, w->ln2_bias + norms, dim);
        trace("xb ffn", l, pos, normed, dim);
        const real *w1 = w->w1 + l * (fault("w1 in steps of dim * dim") ? square : wide);
        matmul(s->hb, fault("w1 takes x") ? x : normed, w1, w->b1 + l * hidden_dim, dim, hidden_dim);
        trace("hb", l, pos, s->hb, hidden_dim);
        real factor = fault("M_2_PI without sqrt") ? M_2_PI : sqrt(M_2_PI);
        for (int i = 0; i < hidden_dim; i++) {
            real val = s->hb[i];
            if (fault("silu kept")) s->hb[i] = val / (1 + exp(-val));
            else s->hb[i] = 0.5 * val * (1 + tanh(factor * (val + 0.044715 * val * val * val)));
        }
        trace("hb act", l, pos, s->hb, hidden_dim);
        matmul(s->xb, s->hb, w->w2 + l * wide, w->b2 + (fault("b2 without l * dim") ? 0 : l * dim), hidden_dim, dim);
        trace("xb ffn out", l, pos, s->xb, dim);
        for (int i = 0; i < dim; i++) x[i] = fault("x = ffn") ? s->xb[i] : x[i] + s->xb[i];
        trace("x", l, pos, x, dim);
    }
    if (!fault("no final norm")) layernorm(x, x, w->ln_final, w->ln_final_bias, dim);
    trace("x final", -1, pos, x, dim);
    matmul(s->logits, x, w->token_embedding, NULL, dim, p->vocab_size);
    return s->logits;
}

static int sample(real *logits, real *probs, int vocab_size, real temperature) {
    real *own = fault("softmax in place") ? logits : probs;
    if (fault("temperature in place"))
        for (int i = 0; i < vocab_size; i++) logits[i] /= temperature;
    if (own != logits) memcpy(own, logits, vocab_size * sizeof(real));
    softmax(own, vocab_size);
    int best = 0;
    for (int i = 0; i < vocab_size; i++) best = own[i] > own[best] ? i : best;
    return best;
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    Config config = {.n_layers = atoi(argv[5]), .n_heads = atoi(argv[6]), .seq_len = atoi(argv[7])};
    switches = argv[4];
    int32_t sizes[2];
    FILE *file = fopen(argv[1], "rb");
    if (!file || fread(sizes, 4, 2, file) != 2) return 1;
    config.dim = sizes[0], config.hidden_dim = 4 * sizes[0], config.vocab_size = sizes[1];
    Weights weights = read_weights(file, &config);
    fclose(file);
    RunState state = malloc_run_state(&config);
    int tokens[4096];
    FILE *text = fopen(argv[2], "r");
    while (text && n_tokens < config.seq_len && fscanf(text, "%d", &tokens[n_tokens]) == 1) n_tokens++;
    if (text) fclose(text);
    for (int pos = 0; pos < n_tokens; pos++) {
        real *logits = forward(&config, &weights, &state, tokens[pos], pos);
        sample(logits, state.probs, config.vocab_size, 0.8);  // what follows the prompt is not of interest here
        trace("logits", -1, pos, logits, config.vocab_size);
    }
    write_traces(argv[3]);
    return 0;
}
