/* GPT-2 in C, one token at a time: a struct for each layer, a run state, one cache of keys and one of values for all layers.
   Usage: kvcache weights.bin ids.txt out-folder ";fault;fault;" layers heads context
   weights.bin: int32 dim and vocabulary; then float32 wte, wpe, and each kind of tensor for all layers (read_weights), ln_f. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef REAL real;

typedef struct {
    real *ln1_g, *ln1_b, *ln2_g, *ln2_b;
    real *qkv_w, *qkv_b, *proj_w, *proj_b, *fc_w, *fc_b, *down_w, *down_b;
} Layer;

typedef struct {
    int dim, n_layers, n_heads, head_size, vocab, context;
    real *wte, *wpe, *lnf_g, *lnf_b;
    Layer *layers;
} Model;

typedef struct {
    real *x, *xb, *xb2, *qkv, *q, *k, *v, *scores, *att, *hb, *act, *logits;
    real *key_cache, *value_cache;  // (n_layers, context, dim)
    real stats[2];                  // mean and 1 / deviation of the last norm
} State;

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

/* ---- what is shown: (tokens, columns) for each name, written as .npy at the end ---- */

typedef struct {
    char name[64];
    int rows, columns, heads;
    real *data;
} Shown;

static Shown shown[1024];
static int n_shown, n_tokens;

static void show(const char *part, int layer, int row, const real *data, int columns, int heads) {
    char name[64];
    if (layer < 0) snprintf(name, sizeof name, "%s", part);
    else snprintf(name, sizeof name, "%d %s", layer, part);
    int at = 0;
    while (at < n_shown && strcmp(shown[at].name, name)) at++;
    if (at == n_shown) {
        n_shown++;
        strcpy(shown[at].name, name);
        shown[at].rows = n_tokens, shown[at].columns = columns, shown[at].heads = heads;
        shown[at].data = zeros((size_t)n_tokens * columns);
    }
    memcpy(shown[at].data + (size_t)row * columns, data, columns * sizeof(real));
}

static void write_shown(const char *folder) {
    for (int at = 0; at < n_shown; at++) {
        Shown *s = &shown[at];
        char path[4096], shape[64], header[128];
        if (s->heads) snprintf(shape, sizeof shape, "(%d, %d, %d)", s->rows, s->heads, s->columns / s->heads);
        else snprintf(shape, sizeof shape, "(%d, %d)", s->rows, s->columns);
        int length = snprintf(header, sizeof header, "{'descr': '<f%d', 'fortran_order': False, 'shape': %s, }",
                              (int)sizeof(real), shape);
        memset(header + length, ' ', 118 - length);
        header[117] = '\n';
        snprintf(path, sizeof path, "%s/%s.npy", folder, s->name);
        FILE *file = fopen(path, "wb");
        if (!file) exit(1);
        fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
        fwrite(header, 1, 118, file);
        fwrite(s->data, sizeof(real), (size_t)s->rows * s->columns, file);
        fclose(file);
    }
}

/* ---- weights ---- */

static real *read_reals(FILE *file, size_t count) {
    real *into = zeros(count);
    int narrow = fault("bfloat16 file");
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        float number;
        if (fread(&bits, 4, 1, file) != 1) exit(1);
        if (narrow) bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
        memcpy(&number, &bits, 4);
        into[i] = number;
    }
    return into;
}

static void read_weights(Model *m, const char *path) {
    FILE *file = fopen(path, "rb");
    int32_t sizes[2];
    if (!file || fread(sizes, 4, 2, file) != 2) exit(1);
    int D = m->dim = sizes[0], V = m->vocab = sizes[1], L = m->n_layers;
    m->head_size = D / m->n_heads;
    real *table = read_reals(file, (size_t)V * D);
    m->wte = zeros((size_t)(V + 64) * D);
    memcpy(m->wte, table, (size_t)V * D * sizeof(real));
    free(table);
    m->wpe = read_reals(file, (size_t)m->context * D);
    Layer *w = m->layers = calloc(L, sizeof(Layer));
    for (int l = 0; l < L; l++) w[l].ln1_g = read_reals(file, D);
    for (int l = 0; l < L; l++) w[l].ln1_b = read_reals(file, D);
    for (int l = 0; l < L; l++) w[l].ln2_g = read_reals(file, D);
    for (int l = 0; l < L; l++) w[l].ln2_b = read_reals(file, D);
    for (int l = 0; l < L; l++) w[l].qkv_w = read_reals(file, (size_t)D * 3 * D);
    for (int l = 0; l < L; l++) w[l].qkv_b = read_reals(file, 3 * D);
    for (int l = 0; l < L; l++) w[l].proj_w = read_reals(file, (size_t)D * D);
    for (int l = 0; l < L; l++) w[l].proj_b = read_reals(file, D);
    for (int l = 0; l < L; l++) w[l].fc_w = read_reals(file, (size_t)D * 4 * D);
    for (int l = 0; l < L; l++) w[l].fc_b = read_reals(file, 4 * D);
    for (int l = 0; l < L; l++) w[l].down_w = read_reals(file, (size_t)4 * D * D);
    for (int l = 0; l < L; l++) w[l].down_b = read_reals(file, D);
    m->lnf_g = read_reals(file, D);
    m->lnf_b = read_reals(file, D);
    fclose(file);
    for (int l = 0; l < L; l++) {
        Layer own = w[l];
        if (fault("b before g")) {
            w[l].ln1_g = own.ln1_b, w[l].ln1_b = own.ln1_g;
            w[l].ln2_g = own.ln2_b, w[l].ln2_b = own.ln2_g;
        } else if (fault("ln_2 before ln_1")) {
            w[l].ln1_g = own.ln2_g, w[l].ln1_b = own.ln2_b;
            w[l].ln2_g = own.ln1_g, w[l].ln2_b = own.ln1_b;
        }
    }
    if (fault("b before g")) {
        real *gain = m->lnf_g;
        m->lnf_g = m->lnf_b, m->lnf_b = gain;
    }
    if (fault("last ln_2 bias not read")) w[L - 1].ln2_b = zeros(D);
    if (fault("second block's c_proj is the first's")) w[1].proj_w = w[0].proj_w, w[1].proj_b = w[0].proj_b;
}

/* ---- parts ---- */

static void layernorm(State *s, real *out, const real *x, const real *g, const real *b, int n) {
    real mean = 0, square = 0;
    if (!fault("rmsnorm"))
        for (int i = 0; i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    real inverse = 1 / sqrt(square + 1e-5);
    for (int i = 0; i < n; i++) {
        out[i] = (x[i] - mean) * inverse * g[i];
        if (!fault("norm without bias")) out[i] += b[i];
    }
    s->stats[0] = mean, s->stats[1] = inverse;
}

static void matmul(real *out, const real *x, const real *w, const real *b, int n_in, int n_out, int turned) {
    turned ^= fault("matmul wants (out, in)");
    for (int o = 0; o < n_out; o++) {
        real sum = b ? b[o] : 0;
        for (int i = 0; i < n_in; i++) sum += x[i] * (turned ? w[(size_t)o * n_in + i] : w[(size_t)i * n_out + o]);
        out[o] = sum;
    }
}

static void softmax(real *x, int n) {
    real most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    for (int i = 0; i < n; i++) sum += x[i] = exp(x[i] - most);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

static real activation(real x) {
    if (fault("silu")) return x / (1 + exp(-x));
    return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x)));
}

static void split(const Model *m, State *s) {
    int D = m->dim, size = m->head_size;
    if (fault("thirds inside heads")) {
        for (int h = 0; h < m->n_heads; h++) {
            memcpy(s->q + h * size, s->qkv + h * 3 * size, size * sizeof(real));
            memcpy(s->k + h * size, s->qkv + h * 3 * size + size, size * sizeof(real));
            memcpy(s->v + h * size, s->qkv + h * 3 * size + 2 * size, size * sizeof(real));
        }
        return;
    }
    int swapped = fault("q v k");
    memcpy(s->q, s->qkv, D * sizeof(real));
    memcpy(s->k, s->qkv + (swapped ? 2 : 1) * D, D * sizeof(real));
    memcpy(s->v, s->qkv + (swapped ? 1 : 2) * D, D * sizeof(real));
}

static void rope(const Model *m, State *s, int pos) {
    for (int i = 0; i < m->dim; i += 2) {
        double angle = pos / pow(10000.0, (double)(i % m->head_size) / m->head_size), c = cos(angle), n = sin(angle);
        for (int which = 0; which < 2; which++) {
            real *pair = (which ? s->k : s->q) + i, first = pair[0], second = pair[1];
            pair[0] = first * c - second * n, pair[1] = first * n + second * c;
        }
    }
}

static void attention(const Model *m, State *s, int l, int pos) {
    int D = m->dim, H = m->n_heads, size = m->head_size, keys = pos + 1;
    size_t offset = (size_t)l * m->context * D;
    if (fault("one cache for all layers")) offset = 0;
    if (fault("layers' caches overlap")) offset = (size_t)l * D;
    if (fault("t < pos")) keys = pos;
    if (fault("t <= pos + 1")) keys = pos + 2;
    if (fault("t < context")) keys = m->context;
    real *all_keys = s->key_cache + offset, *all_values = s->value_cache + offset;
    memcpy(all_keys + (size_t)pos * D, s->k, D * sizeof(real));
    memcpy(all_values + (size_t)pos * D, fault("k stored as v") ? s->k : s->v, D * sizeof(real));
    double scale = sqrt(fault("root of dim") ? D : size);
    if (fault("no scale")) scale = 1;
    int from = size, step = 1;  // a head begins at h * from, and its numbers are `step` apart
    if (fault("heads strided")) from = 1, step = H;
    memset(s->xb2, 0, D * sizeof(real));
    for (int h = 0; h < H; h++) {
        real *score = s->scores + h * m->context, *att = s->att + h * m->context;
        for (int t = 0; t < keys; t++) {
            real sum = 0;
            for (int i = 0; i < size; i++) sum += s->q[h * from + i * step] * all_keys[(size_t)t * D + h * from + i * step];
            score[t] = att[t] = sum / scale;
        }
        softmax(att, keys);
        for (int t = 0; t < keys; t++)
            for (int i = 0; i < size; i++) {
                int at = h * from + i * step;
                s->xb2[at] += att[t] * all_values[(size_t)t * D + at];
            }
    }
}

static void show_heads(const Model *m, const char *part, int l, int pos, const real *buffer) {
    real *packed = zeros((size_t)m->n_heads * n_tokens);
    for (int h = 0; h < m->n_heads; h++) memcpy(packed + h * n_tokens, buffer + h * m->context, n_tokens * sizeof(real));
    show(part, l, pos, packed, m->n_heads * n_tokens, m->n_heads);
    free(packed);
}

static void forward(const Model *m, State *s, int token, int pos) {
    int D = m->dim, layers = m->n_layers - fault("l < n_layers - 1");
    const real *place = m->wpe + (size_t)(pos + fault("pos + 1")) * D;
    for (int i = 0; i < D; i++) s->x[i] = m->wte[(size_t)token * D + i] + (fault("no wpe") ? 0 : place[i]);
    show("x embedded", -1, pos, s->x, D, 0);
    const Layer *w = m->layers;
    for (int l = 0; l < layers; l++) {
        layernorm(s, s->xb, s->x, w->ln1_g, w->ln1_b, D);
        show("ln_1", l, pos, s->xb, D, 0), show("mean", l, pos, s->stats, 1, 0), show("rstd", l, pos, s->stats + 1, 1, 0);
        matmul(s->qkv, s->xb, w->qkv_w, fault("c_attn without bias") ? NULL : w->qkv_b, D, 3 * D, 0);
        show("qkv", l, pos, s->qkv, 3 * D, 0);
        split(m, s);
        if (fault("rope kept")) rope(m, s, pos);
        show("q", l, pos, s->q, D, 0), show("k", l, pos, s->k, D, 0), show("v", l, pos, s->v, D, 0);
        attention(m, s, l, pos);
        show_heads(m, "scores", l, pos, s->scores), show_heads(m, "weights", l, pos, s->att);
        show("mixed", l, pos, s->xb2, D, 0);
        matmul(s->hb, s->xb2, w->proj_w, w->proj_b, D, D, fault("c_proj read as (out, in)"));
        show("attended", l, pos, s->hb, D, 0);
        if (fault("attention overwrites x")) memset(s->x, 0, D * sizeof(real));
        if (fault("skip from xb")) memcpy(s->x, s->xb, D * sizeof(real));
        for (int i = 0; i < D; i++) s->x[i] += s->hb[i];
        show("middle", l, pos, s->x, D, 0);
        layernorm(s, s->xb, s->x, w->ln2_g, w->ln2_b, D);
        show("ln_2", l, pos, s->xb, D, 0);
        matmul(s->hb, fault("mlp takes x") ? s->x : s->xb, w->fc_w, w->fc_b, D, 4 * D, 0);
        show("up", l, pos, s->hb, 4 * D, 0);
        for (int i = 0; i < 4 * D; i++) s->act[i] = activation(s->hb[i]);
        show("act", l, pos, s->act, 4 * D, 0);
        matmul(s->xb, s->act, w->down_w, w->down_b, 4 * D, D, 0);
        show("fed", l, pos, s->xb, D, 0);
        for (int i = 0; i < D; i++) s->x[i] += s->xb[i];
        show("result", l, pos, s->x, D, 0);
        if (!fault("pointer never moved")) w++;
    }
    const Layer *last = &m->layers[m->n_layers - 1];
    int other = fault("last norm is the last ln_2");
    memcpy(s->xb, s->x, D * sizeof(real));
    if (!fault("no last norm")) layernorm(s, s->xb, s->x, other ? last->ln2_g : m->lnf_g, other ? last->ln2_b : m->lnf_b, D);
    show("x final", -1, pos, s->xb, D, 0);
    int vocab = fault("padded vocabulary") ? (m->vocab + 63) / 64 * 64 : m->vocab;
    for (int t = 0; t < vocab; t++) {
        s->logits[t] = 0;
        for (int i = 0; i < D; i++) s->logits[t] += s->xb[i] * m->wte[(size_t)t * D + i];
    }
    if (fault("softmax in place")) softmax(s->logits, vocab);
    show("logits", -1, pos, s->logits, vocab, 0);
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    Model m = {.n_layers = atoi(argv[5]), .n_heads = atoi(argv[6]), .context = atoi(argv[7])};
    switches = argv[4];
    read_weights(&m, argv[1]);
    int tokens[4096], D = m.dim, C = m.context;
    FILE *file = fopen(argv[2], "r");
    while (file && n_tokens < 4096 && fscanf(file, "%d", &tokens[n_tokens]) == 1) n_tokens++;
    if (file) fclose(file);
    State s = {.x = zeros(D), .xb = zeros(D), .xb2 = zeros(D), .qkv = zeros(3 * D), .q = zeros(D), .k = zeros(D), .v = zeros(D)};
    s.scores = zeros(m.n_heads * C), s.att = zeros(m.n_heads * C), s.hb = zeros(4 * D), s.act = zeros(4 * D);
    s.logits = zeros(m.vocab + 64);
    s.key_cache = zeros((size_t)m.n_layers * C * D), s.value_cache = zeros((size_t)m.n_layers * C * D);
    for (int pos = 0; pos < n_tokens; pos++) {
        real number[2] = {tokens[pos], pos};
        show("x token", -1, pos, number, 1, 0), show("x position", -1, pos, number + 1, 1, 0);
        forward(&m, &s, tokens[pos], pos);
    }
    write_shown(argv[3]);
    return 0;
}
