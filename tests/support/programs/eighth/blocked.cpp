// GPT-2 as an inference engine: the prompt in one chunk, then a token at a time; matrices stored [out][in], tiles of 8 outputs,
// a cache for each head. blocked MODEL.safetensors IDS OUT FAULTS L H CTX, compiled with -DREAL=float or double. See SOURCES.md.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

typedef REAL real;
typedef std::vector<real> Buffer;

static std::string faults, header, blob, folder;
static bool on(const std::string &name) { return faults.find(";" + name + ";") != std::string::npos; }

static Buffer tensor(const std::string &name) {
    size_t at = header.find("\"" + name + "\":");
    if (at == std::string::npos) fprintf(stderr, "no %s\n", name.c_str()), exit(1);
    long begin, end;
    at = header.find("data_offsets", at);
    if (sscanf(header.c_str() + header.find('[', at), "[%ld,%ld]", &begin, &end) != 2) exit(1);
    Buffer out((end - begin) / 4);
    for (size_t i = 0; i < out.size(); i++) {
        float value;
        memcpy(&value, blob.data() + begin + 4 * i, 4);
        out[i] = value;
    }
    return out;
}

struct Linear {
    int in, out;
    Buffer w, b;  // w is [out][in]
    void load(const std::string &name, int inputs, int outputs, bool turned) {
        in = inputs, out = outputs, b = tensor(name + ".bias");
        Buffer file = tensor(name + ".weight");  // [in][out]
        w = file;
        if (turned)
            for (int i = 0; i < in; i++)
                for (int o = 0; o < out; o++) w[(size_t)o * in + i] = file[(size_t)i * out + o];
    }
    void run(const real *x, real *y, int rows) const {
        for (int tile = 0; tile < out; tile += 8)
            for (int r = 0; r < rows; r++)
                for (int o = tile; o < std::min(tile + 8, out); o++) {
                    real sum = 0;
                    for (int i = 0; i < in; i++) sum += x[r * in + i] * w[(size_t)o * in + i];
                    y[r * out + o] = sum;
                }
        int biased = on("bias for the first columns") ? std::min(out, (rows + 15) / 16 * 16) : out;  // rows taken for columns
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < biased; o++) y[r * out + o] += b[o];
    }
};

struct Norm {
    Buffer w, b;
    void load(const std::string &name) { w = tensor(name + ".weight"), b = tensor(name + ".bias"); }
    void run(const real *x, real *y, int rows) const {
        int n = w.size();
        for (int r = 0; r < rows; r++) {
            real mean = 0, var = 0;
            for (int i = 0; i < n; i++) mean += x[r * n + i];
            mean /= n;
            for (int i = 0; i < n; i++) var += (x[r * n + i] - mean) * (x[r * n + i] - mean);
            bool outside = on("n-1 and eps outside");
            var /= outside || on("variance by n-1") ? n - 1 : n;
            real below = outside ? std::sqrt(var) + (real)1e-12 : std::sqrt(var + (real)1e-5);
            for (int i = 0; i < n; i++) {
                real normed = (x[r * n + i] - mean) / below;
                y[r * n + i] = on("no gain and bias") ? normed : normed * w[i] + b[i];
            }
        }
    }
};

static real gelu(real x) {
    if (on("erf")) return (real)0.5 * x * (1 + std::erf(x / std::sqrt((real)2)));
    if (on("relu")) return x > 0 ? x : 0;
    real cubic = on("0.44715") ? 0.44715 : 0.044715;
    return (real)0.5 * x * (1 + std::tanh((real)std::sqrt(2 / M_PI) * (x + cubic * x * x * x)));
}

enum { LN1, QKV, MIXED, ATTENDED, MIDDLE, LN2, UP, ACT, FED, RESULT, KINDS };
static const char *KIND[] = {"ln_1", "qkv", "mixed", "attended", "middle", "ln_2", "up", "act", "fed", "result"};
static const int WIDTHS[] = {1, 3, 1, 1, 1, 1, 4, 4, 1, 1};

struct Layer {
    Norm ln1, ln2;
    Linear qkv, proj, fc, out;
    Buffer cache[3];  // queries, keys, values: [H][T][D]
    Buffer weights;   // [H][T][T]
    Buffer kept[KINDS];
};

static int C, H, L, V, CTX, T, D;
static Buffer wte, wpe, head, embedded, final_, logits;
static std::vector<Layer> layers;
static std::vector<int> ids;
static Norm lnf;

static void attend(Layer &layer, const real *qkv, real *mixed, int start, int count) {
    int heads = on("one head") ? 1 : H, size = C / heads, until = start + count;
    static const int ORDER[2][3] = {{0, 1, 2}, {0, 2, 1}};
    for (int t = 0; t < count; t++)
        for (int p = 0; p < 3; p++)
            for (int h = 0; h < heads; h++)
                for (int i = 0; i < size; i++) {
                    int from = ORDER[on("order q v k")][p] * C + h * size + i;
                    if (on("thirds in heads")) from = (h * 3 + p) * size + i;
                    layer.cache[p][((size_t)h * T + start + t) * size + i] = qkv[t * 3 * C + from];
                }
    real scale = 1 / std::sqrt((real)(on("scaled by width") ? C : D));
    if (on("scaled twice")) scale *= scale;
    if (on("unscaled")) scale = 1;
    Buffer heads_first((size_t)heads * count * size), turned((size_t)size * std::max(until, size) + until + size);
    for (int h = 0; h < heads; h++) {
        const real *q = &layer.cache[0][(size_t)h * T * size], *k = q, *v = &layer.cache[2][(size_t)h * T * size];
        k = &layer.cache[1][(size_t)h * T * size];
        if (on("keys times queries")) std::swap(q, k);
        std::fill(turned.begin(), turned.end(), (real)0);
        int stride = on("transposed with the columns' stride") ? size : until;
        for (int s = 0; s < until; s++)
            for (int i = 0; i < size; i++) turned[(size_t)i * stride + s] = k[s * size + i];
        for (int t = 0; t < count; t++) {
            real *w = &layer.weights[((size_t)h * T + start + t) * T], most = -INFINITY, sum = 0;
            int seen = start + t + 1;
            if (on("prompt without a mask") || on("hidden is 1e-10")) seen = until;
            if (on("keys before the token")) seen = start + t;
            for (int s = 0; s < seen; s++) {
                real score = 0;
                for (int i = 0; i < size; i++) score += q[(start + t) * size + i] * turned[(size_t)i * until + s];
                w[s] = on("hidden is 1e-10") && s > start + t ? (real)1e-10 : score * scale;
                most = std::max(most, w[s]);
            }
            for (int s = 0; s < seen; s++) sum += w[s] = std::exp(w[s] - most);
            for (int s = 0; s < seen; s++) w[s] /= sum;
            for (int i = 0; i < size; i++) {
                real mix = 0;
                for (int s = 0; s < seen; s++) mix += w[s] * v[s * size + i];
                heads_first[((size_t)h * count + t) * size + i] = mix;
            }
        }
    }
    for (int h = 0; h < heads; h++)
        for (int t = 0; t < count; t++)
            for (int i = 0; i < size; i++) mixed[t * C + h * size + i] = heads_first[((size_t)h * count + t) * size + i];
    if (on("merged by view")) std::copy(heads_first.begin(), heads_first.end(), mixed);
}

static void forward(int start, int count) {
    Buffer x((size_t)count * C);
    for (int t = 0; t < count; t++) {
        int at = start + t;
        if (on("steps from position 0")) at = t;
        if (on("steps at the number of heads")) at = (start ? H : 0) + t;
        bool without = on("no position for one token") && count == 1;
        for (int i = 0; i < C; i++) x[t * C + i] = wte[(size_t)ids[start + t] * C + i] + (without ? 0 : wpe[(size_t)at * C + i]);
    }
    std::copy(x.begin(), x.end(), &embedded[(size_t)start * C]);
    for (Layer &layer : layers) {
        real *at[KINDS];
        for (int k = 0; k < KINDS; k++) at[k] = &layer.kept[k][(size_t)start * WIDTHS[k] * C];
        layer.ln1.run(x.data(), at[LN1], count);
        layer.qkv.run(at[LN1], at[QKV], count);
        attend(layer, at[QKV], at[MIXED], start, count);
        if (on("no output projection")) std::copy(at[MIXED], at[MIXED] + (size_t)count * C, at[ATTENDED]);
        else layer.proj.run(at[MIXED], at[ATTENDED], count);
        for (int i = 0; i < count * C; i++) at[MIDDLE][i] = (on("no residuals") ? 0 : x[i]) + at[ATTENDED][i];
        layer.ln2.run(at[MIDDLE], at[LN2], count);
        layer.fc.run(at[LN2], at[UP], count);
        for (int i = 0; i < count * 4 * C; i++) at[ACT][i] = gelu(at[UP][i]);
        layer.out.run(at[ACT], at[FED], count);
        for (int i = 0; i < count * C; i++) {
            real base = at[MIDDLE][i];
            if (on("no residuals")) base = 0;
            if (on("second sum with the norm")) base = at[LN2][i];
            if (on("norm added as well")) base += at[LN2][i];
            x[i] = at[RESULT][i] = base + at[FED][i];
        }
    }
    real *last = &final_[(size_t)start * C];
    lnf.run(x.data(), last, count);
    if (on("no final norm")) std::copy(x.begin(), x.end(), last);
    for (int t = 0; t < count; t++)
        for (int v = 0; v < V; v++) {
            real sum = 0;
            for (int i = 0; i < C; i++) sum += last[t * C + i] * head[(size_t)v * C + i];
            logits[(size_t)(start + t) * V + v] = sum;
        }
}

static void dump(const std::string &name, const Buffer &data, const std::string &shape) {
    char text[200];
    snprintf(text, sizeof text, "{'descr': '<f%d', 'fortran_order': False, 'shape': (%s)}", (int)sizeof(real), shape.c_str());
    FILE *file = fopen((folder + "/" + name + ".npy").c_str(), "wb");
    if (!file) exit(1);
    fprintf(file, "\x93NUMPY\x01%c\x76%c%-117s\n", 0, 0, text);
    fwrite(data.data(), sizeof(real), data.size(), file);
    fclose(file);
}

static std::string sizes(std::initializer_list<int> each) {
    std::string out;
    for (int size : each) out += std::to_string(size) + ", ";
    return out;
}

int main(int argc, char **argv) {
    if (argc != 8) return 2;
    std::ifstream file(argv[1], std::ios::binary);
    uint64_t size;
    file.read((char *)&size, 8);
    header.resize(size);
    file.read(&header[0], size);
    std::stringstream rest;
    rest << file.rdbuf();
    blob = rest.str();
    std::ifstream text(argv[2]);
    for (int id; text >> id;) ids.push_back(id);
    folder = argv[3], faults = argv[4], L = atoi(argv[5]), H = atoi(argv[6]), CTX = atoi(argv[7]), T = ids.size();
    wte = tensor("wte.weight"), wpe = tensor("wpe.weight"), C = wpe.size() / CTX, V = wte.size() / C, D = C / H;
    head = wte;
    uint32_t state = 7;
    if (on("head not tied"))
        for (real &value : head) state = state * 1664525u + 1013904223u, value = (state / 4294967296.0 - 0.5) * 0.4;
    lnf.load("ln_f");
    layers.resize(L);
    bool all = !on("matrices not turned"), mlp = all && !on("feed-forward not turned");
    for (int l = 0; l < L; l++) {
        std::string at = "h." + std::to_string(l) + ".";
        Layer &layer = layers[l];
        layer.ln1.load(at + "ln_1"), layer.ln2.load(at + "ln_2");
        if (on("ln_1 with ln_2's bias")) layer.ln1.b = layer.ln2.b;
        layer.qkv.load(at + "attn.c_attn", C, 3 * C, all), layer.proj.load(at + "attn.c_proj", C, C, all);
        layer.fc.load(at + "mlp.c_fc", C, 4 * C, mlp), layer.out.load(at + "mlp.c_proj", 4 * C, C, mlp);
        for (Buffer &one : layer.cache) one.assign((size_t)T * C, 0);
        layer.weights.assign((size_t)H * T * T, 0);
        for (int k = 0; k < KINDS; k++) layer.kept[k].assign((size_t)T * WIDTHS[k] * C, 0);
    }
    embedded.assign((size_t)T * C, 0), final_ = embedded, logits.assign((size_t)T * V, 0);
    int prompt = on("hidden is 1e-10") ? T : T / 2 + 1;
    forward(0, prompt);
    for (int t = prompt; t < T; t++) forward(t, 1);
    for (int l = 0; l < L; l++) {
        std::string at = std::to_string(l) + " ";
        for (int k = 0; k < KINDS; k++) dump(at + KIND[k], layers[l].kept[k], sizes({T, WIDTHS[k] * C}));
        dump(at + "weights", layers[l].weights, sizes({H, T, T}));
        dump(at + "keys", layers[l].cache[1], sizes({H, T, D})), dump(at + "values", layers[l].cache[2], sizes({H, T, D}));
    }
    dump("x embedded", embedded, sizes({T, C})), dump("x final", final_, sizes({T, C})), dump("logits", logits, sizes({T, V}));
    return 0;
}
