/* GPT-2 in C in the manner of ggml: tensors with sizes and strides, views, a memory of keys and values, a prompt in chunks.
   Usage: ops weights.bin ids.txt out-folder ";fault;fault;" layers heads context
   weights.bin: int32 n_embd and n_vocab; then float32 tensors in the order of the model, matrices (in, out) as GPT-2 has them.
   ne[0] counts the numbers that lie side by side. A matrix of weights has ne = (in, out), so the file's are turned when read.
   Operations are done as they are written down. */
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

/* ---- tensors ---- */

typedef struct {
    int ne[3], nb[3];  // sizes, and steps from one to the next, in numbers
    real *data;
} tensor;

static tensor new_3d(int ne0, int ne1, int ne2) {
    real *data = calloc((size_t)ne0 * ne1 * ne2, sizeof(real));
    if (!data) exit(1);
    return (tensor){{ne0, ne1, ne2}, {1, ne0, ne0 * ne1}, data};
}

static tensor new_2d(int ne0, int ne1) { return new_3d(ne0, ne1, 1); }
static real *at(tensor t, int i0, int i1, int i2) {
    return t.data + (size_t)i0 * t.nb[0] + (size_t)i1 * t.nb[1] + (size_t)i2 * t.nb[2];
}

static tensor view_3d(tensor t, int ne0, int ne1, int ne2, int nb1, int nb2, size_t offset) {
    return (tensor){{ne0, ne1, ne2}, {1, nb1, nb2}, t.data + offset};
}
static tensor reshape_3d(tensor t, int ne0, int ne1, int ne2) { return view_3d(t, ne0, ne1, ne2, ne0, ne0 * ne1, 0); }

// Axis 0 becomes axis `to0`, and so on.
static tensor permute(tensor t, int to0, int to1, int to2) {
    tensor out = {.data = t.data};
    out.ne[to0] = t.ne[0], out.ne[to1] = t.ne[1], out.ne[to2] = t.ne[2];
    out.nb[to0] = t.nb[0], out.nb[to1] = t.nb[1], out.nb[to2] = t.nb[2];
    return out;
}

static void cpy(tensor from, tensor to) {  // as many numbers, in the order of their sizes
    int n = 0;
    for (int i2 = 0; i2 < from.ne[2]; i2++)
        for (int i1 = 0; i1 < from.ne[1]; i1++)
            for (int i0 = 0; i0 < from.ne[0]; i0++, n++)
                *at(to, n % to.ne[0], n / to.ne[0] % to.ne[1], n / to.ne[0] / to.ne[1]) = *at(from, i0, i1, i2);
}

static tensor cont_2d(tensor t, int ne0, int ne1) {
    tensor out = new_2d(ne0, ne1);
    return cpy(t, out), out;
}

/* ---- operations ---- */

// (k, m, z) and (k, n, z) -> (m, n, z)
static tensor mul_mat(tensor a, tensor b) {
    tensor out = new_3d(a.ne[1], b.ne[1], b.ne[2]);
    if (a.ne[0] != b.ne[0] || a.ne[2] != b.ne[2]) exit(3);
    for (int z = 0; z < b.ne[2]; z++)
        for (int n = 0; n < b.ne[1]; n++)
            for (int m = 0; m < a.ne[1]; m++) {
                real sum = 0;
                for (int k = 0; k < a.ne[0]; k++) sum += *at(a, k, m, z) * *at(b, k, n, z);
                *at(out, m, n, z) = sum;
            }
    return out;
}

// a * b or a + b for matrices; a row b is used for every row of a.
static tensor apply(char op, tensor a, tensor b, int inplace) {
    tensor out = inplace ? a : new_2d(a.ne[0], a.ne[1]);
    for (int n = 0; n < a.ne[0] * a.ne[1]; n++) {
        real other = b.data[b.ne[1] == 1 ? n % a.ne[0] : n];
        out.data[n] = op == '*' ? a.data[n] * other : a.data[n] + other;
    }
    return out;
}

static tensor add(tensor a, tensor b) { return apply('+', a, b, 0); }

static tensor get_rows(tensor t, const int *rows, int n) {
    tensor out = new_2d(t.ne[0], n);
    for (int i = 0; i < n; i++) memcpy(at(out, 0, i, 0), at(t, 0, rows[i], 0), t.ne[0] * sizeof(real));
    return out;
}

static tensor norm(tensor t, int inplace) {
    tensor out = inplace ? t : new_2d(t.ne[0], t.ne[1]);
    for (int i1 = 0, n = t.ne[0]; i1 < t.ne[1]; i1++) {
        real *x = at(t, 0, i1, 0), *y = at(out, 0, i1, 0), mean = 0, sum = 0;
        for (int i = 0; i < n && !fault("rms_norm"); i++) mean += x[i] / n;
        for (int i = 0; i < n; i++) y[i] = x[i] - mean, sum += y[i] * y[i];
        for (int i = 0; i < n; i++) y[i] /= sqrt(sum / n + 1e-5);
    }
    return out;
}

static void scale(tensor t, real factor) {
    for (int n = 0; n < t.ne[0] * t.ne[1] * t.ne[2]; n++) t.data[n] *= factor;
}

static void diag_mask(tensor t, int n_past, real value) {
    for (int z = 0; z < t.ne[2]; z++)
        for (int i = 0; i < t.ne[1]; i++)
            for (int j = n_past + i + 1; j < t.ne[0]; j++) *at(t, j, i, z) = value;
}

static tensor soft_max(tensor t, real factor, int inplace) {
    tensor out = inplace ? t : new_3d(t.ne[0], t.ne[1], t.ne[2]);
    for (int row = 0, n = t.ne[0]; row < t.ne[1] * t.ne[2]; row++) {
        real *x = t.data + row * n, *y = out.data + row * n, most = -INFINITY, sum = 0;
        for (int i = 0; i < n; i++) most = fmax(most, x[i]);
        for (int i = 0; i < n; i++) sum += y[i] = exp((x[i] - most) * factor);
        for (int i = 0; i < n; i++) y[i] /= sum;
    }
    return out;
}

static real gelu(real x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static real silu(real x) { return x / (1 + exp(-x)); }

static tensor map(tensor t, real (*of)(real)) {
    tensor out = new_2d(t.ne[0], t.ne[1]);
    for (int n = 0; n < t.ne[0] * t.ne[1]; n++) out.data[n] = of(t.data[n]);
    return out;
}

static void rope(tensor t, int n_past, int n_rot) {
    for (int i1 = 0; i1 < t.ne[1]; i1++)
        for (int i = 0; i < t.ne[0]; i += 2) {
            real *x = at(t, i, i1, 0), x0 = x[0], x1 = x[1], theta = (n_past + i1) * pow(10000, -(i % n_rot) / (real)n_rot);
            x[0] = x0 * cos(theta) - x1 * sin(theta), x[1] = x0 * sin(theta) + x1 * cos(theta);
        }
}

/* ---- what is shown: each value of all chunks as one .npy ---- */

typedef struct {
    char name[32];
    int heads, width;  // (tokens, width), or (heads, tokens, width) if there are several heads
    real *data;
} shown;

static shown all_shown[512];
static int n_shown, n_tokens;

// Columns (width, N) of tokens from n_past on, or (keys, N, heads).
static tensor show(const char *part, int il, tensor t, int n_past) {
    char name[32];
    if (il < 0) snprintf(name, sizeof name, "%s", part);
    else snprintf(name, sizeof name, "%d %s", il, part);
    int n = 0, width = t.ne[2] > 1 ? n_tokens : t.ne[0];
    while (n < n_shown && strcmp(all_shown[n].name, name)) n++;
    if (n == n_shown) {
        if (n_shown++ == 512) exit(1);
        all_shown[n] = (shown){.heads = t.ne[2], .width = width, .data = new_3d(width, n_tokens, t.ne[2]).data};
        strcpy(all_shown[n].name, name);
    }
    for (int h = 0; h < t.ne[2]; h++)
        for (int i = 0; i < t.ne[1]; i++)
            for (int j = 0; j < t.ne[0]; j++) all_shown[n].data[(h * n_tokens + n_past + i) * width + j] = *at(t, j, i, h);
    return t;
}

static void write_all(const char *folder) {
    for (int n = 0; n < n_shown; n++) {
        shown s = all_shown[n];
        char path[4096], header[128], heads[16] = "";
        if (s.heads > 1) snprintf(heads, sizeof heads, "%d, ", s.heads);
        snprintf(path, sizeof path, "%s/%s.npy", folder, s.name);
        snprintf(header, sizeof header, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%s%d, %d), }", (int)sizeof(real),
                 heads, n_tokens, s.width);
        FILE *file = fopen(path, "wb");
        fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
        fprintf(file, "%-117s\n", header);
        fwrite(s.data, sizeof(real), (size_t)n_tokens * s.width * s.heads, file);
        fclose(file);
    }
}

/* ---- the model ---- */

typedef struct {
    tensor ln_1_g, ln_1_b, c_attn_w, c_attn_b, c_proj_w, c_proj_b, ln_2_g, ln_2_b, fc_w, fc_b, mlp_proj_w, mlp_proj_b;
} layer;

typedef struct {
    int n_embd, n_head, n_layer, n_ctx, n_vocab;
    tensor wte, wpe, ln_f_g, ln_f_b, memory_k, memory_v;
    layer *layers;
} model;

static tensor read_rows(FILE *file, int ne0, int ne1, int of_file) {  // the file may have fewer rows
    tensor t = new_2d(ne0, ne1);
    float number;
    for (size_t n = 0; n < (size_t)ne0 * of_file; n++) {
        if (fread(&number, sizeof number, 1, file) != 1) exit(1);
        t.data[n] = number;
    }
    return t;
}
static tensor read_row(FILE *file, int ne0) { return read_rows(file, ne0, 1, 1); }
static tensor read_matrix(FILE *file, int n_in, int n_out, int turned) {
    tensor as_in_file = read_rows(file, n_out, n_in, n_in);
    if (!turned || fault("no matrix turned")) return reshape_3d(as_in_file, n_in, n_out, 1);
    return cont_2d(permute(as_in_file, 1, 0, 2), n_in, n_out);
}

static void load(model *m, FILE *file) {
    int D = m->n_embd, in_file = m->n_vocab;
    if (fault("n_vocab in blocks of 32")) m->n_vocab = (in_file + 31) / 32 * 32;
    m->wte = read_rows(file, D, m->n_vocab, in_file);
    m->wpe = read_rows(file, D, m->n_ctx, m->n_ctx);
    m->layers = calloc(m->n_layer, sizeof(layer));
    for (int il = 0; il < m->n_layer; il++) {
        layer *l = &m->layers[il];
        l->ln_1_g = read_row(file, D), l->ln_1_b = read_row(file, D);
        l->c_attn_w = read_matrix(file, D, 3 * D, 1), l->c_attn_b = read_row(file, 3 * D);
        l->c_proj_w = read_matrix(file, D, D, !fault("attn c_proj not turned")), l->c_proj_b = read_row(file, D);
        l->ln_2_g = read_row(file, D), l->ln_2_b = read_row(file, D);
        l->fc_w = read_matrix(file, D, 4 * D, 1), l->fc_b = read_row(file, 4 * D);
        l->mlp_proj_w = read_matrix(file, 4 * D, D, 1), l->mlp_proj_b = read_row(file, D);
    }
    m->ln_f_g = read_row(file, D), m->ln_f_b = read_row(file, D);
    m->memory_k = new_2d(D, m->n_layer * m->n_ctx), m->memory_v = new_2d(D, m->n_layer * m->n_ctx);
}

static tensor layer_norm(tensor x, tensor g, tensor b) {
    int inplace = fault("norm in place");
    x = norm(x, inplace);
    return fault("norm without g and b") ? x : apply('+', apply('*', x, g, inplace), b, inplace);
}

// Number i of head h, of any token: (size, tokens, heads).
static tensor split_heads(tensor t, int size, int n_head, int tokens) {
    if (fault("heads not permuted")) return reshape_3d(t, size, tokens, n_head);
    return permute(reshape_3d(t, size, n_head, tokens), 0, 2, 1);
}

static tensor attention(const model *m, tensor cur, int il, int n_past) {
    int D = m->n_embd, H = m->n_head, size = D / H, N = cur.ne[1], T = n_past + N, inside = fault("views inside each head");
    int step = inside ? 3 * size : size, next = inside ? size : D, exchanged = fault("K and V views exchanged");
    tensor Qcur = cont_2d(view_3d(cur, size, H, N, step, 3 * D, 0), D, N);
    tensor Kcur = cont_2d(view_3d(cur, size, H, N, step, 3 * D, (exchanged ? 2 : 1) * next), D, N);
    tensor Vcur = cont_2d(view_3d(cur, size, H, N, step, 3 * D, (exchanged ? 1 : 2) * next), D, N);
    if (fault("rope kept")) rope(Qcur, n_past, size), rope(Kcur, n_past, size);
    show("Qcur", il, Qcur, n_past), show("Kcur", il, Kcur, n_past), show("Vcur", il, Vcur, n_past);

    size_t first = fault("memory without il") ? 0 : (size_t)D * il * m->n_ctx;
    size_t place = first + (fault("n_past without n_embd") ? n_past : D * n_past);
    cpy(Kcur, view_3d(m->memory_k, D, N, 1, D, D * N, place));
    cpy(Vcur, view_3d(m->memory_v, D, N, 1, D, D * N, place));
    tensor past_v = fault("V from memory_k") ? m->memory_k : m->memory_v;
    tensor Q = split_heads(Qcur, size, H, N);
    tensor K = split_heads(view_3d(m->memory_k, D, T, 1, D, D * T, first), size, H, T);
    tensor V = split_heads(view_3d(past_v, D, T, 1, D, D * T, first), size, H, T);

    tensor KQ = mul_mat(K, Q);  // (T, N, heads)
    real root = 1 / sqrt(fault("root of n_embd") ? D : size), masked = fault("diag_mask_zero") ? 0 : -INFINITY;
    if (!fault("KQ not scaled")) scale(KQ, root);
    if (!fault("no diag_mask")) diag_mask(KQ, fault("diag_mask without n_past") ? 0 : n_past, masked);
    KQ = soft_max(show("KQ_masked", il, KQ, n_past), fault("soft_max scales again") ? root : 1, 0);
    tensor KQV = mul_mat(permute(V, 1, 0, 2), show("KQ_soft_max", il, KQ, n_past));  // (size, N, heads)
    tensor merged = cont_2d(fault("KQV not permuted") ? KQV : permute(KQV, 0, 2, 1), D, N);
    return show("KQV_merged", il, merged, n_past);
}

static tensor eval(const model *m, int n_past, const int *tokens, int N) {
    int positions[64];
    for (int i = 0; i < N; i++) positions[i] = fault("positions without n_past") ? i : n_past + i;
    tensor inpL = get_rows(m->wte, tokens, N);
    if (!fault("no wpe")) inpL = add(inpL, get_rows(m->wpe, positions, N));
    show("x inp", -1, inpL, n_past);
    for (int il = 0; il < m->n_layer; il++) {
        const layer *l = &m->layers[fault("layers[0]") ? 0 : il];
        int again = fault("ln_1_g and ln_1_b again");
        tensor cur = show("norm_1", il, layer_norm(inpL, l->ln_1_g, l->ln_1_b), n_past);
        cur = mul_mat(l->c_attn_w, cur);
        if (!fault("c_attn without bias")) cur = add(cur, l->c_attn_b);
        cur = attention(m, show("c_attn", il, cur, n_past), il, n_past);
        cur = show("attn_proj", il, add(mul_mat(l->c_proj_w, cur), l->c_proj_b), n_past);
        tensor inpFF = show("inpFF", il, fault("attention without its add") ? cur : add(cur, inpL), n_past);
        cur = fault("second norm of inpL") ? inpL : inpFF;
        cur = layer_norm(cur, again ? l->ln_1_g : l->ln_2_g, again ? l->ln_1_b : l->ln_2_b);
        cur = add(mul_mat(l->fc_w, show("norm_2", il, cur, n_past)), l->fc_b);
        cur = map(show("fc", il, cur, n_past), fault("silu") ? silu : gelu);
        cur = mul_mat(l->mlp_proj_w, show("act", il, cur, n_past));
        if (!fault("mlp c_proj without bias")) cur = add(cur, l->mlp_proj_b);
        inpL = show("inpL", il, add(show("ffn_out", il, cur, n_past), inpFF), n_past);
    }
    if (!fault("no ln_f")) inpL = layer_norm(inpL, m->ln_f_g, m->ln_f_b);
    return mul_mat(m->wte, show("x result_norm", -1, inpL, n_past));
}

// What follows the prompt is not of interest here: the probabilities are dropped.
static tensor sample(tensor logits, real temperature) {
    if (fault("temperature in place")) scale(logits, 1 / temperature);
    return soft_max(logits, 1, fault("soft_max in place")), logits;
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    model m = {.n_layer = atoi(argv[5]), .n_head = atoi(argv[6]), .n_ctx = atoi(argv[7])};
    switches = argv[4];
    int32_t sizes[2];
    int tokens[4096], n_batch = 8;
    FILE *file = fopen(argv[1], "rb"), *text = fopen(argv[2], "r");
    if (!file || !text || fread(sizes, 4, 2, file) != 2) return 1;
    m.n_embd = sizes[0], m.n_vocab = sizes[1], load(&m, file);
    while (n_tokens < m.n_ctx && fscanf(text, "%d", &tokens[n_tokens]) == 1) n_tokens++;
    for (int n_past = 0; n_past < n_tokens; n_past += n_batch) {
        int N = n_tokens - n_past < n_batch ? n_tokens - n_past : n_batch;
        show("logits", -1, sample(eval(&m, n_past, tokens + n_past, N), 0.8), n_past);
    }
    write_all(argv[3]);
    return 0;
}
