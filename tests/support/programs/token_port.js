// A GPT-2 in JavaScript: typed arrays, one token's vector after another, q, k and v of a head apart. A program for node alone.
//
//   node token_port.js IDS.txt OUT.safetensors MODEL.safetensors CONFIG.json [FAULTS] [LEVEL] [DTYPE] [COMPUTE] [SEED]
//
// IDS.txt: ids parted by spaces; the first line is run. FAULTS: a line in the words of tests/support/faulty/meanings.toml.
// LEVEL: full, block, logits. COMPUTE: float64, or float32, where every stored number is rounded. SEED of the arrays that have
// nothing to do with the model; -1 for none.
"use strict";
const fs = require("fs");

const [idsFile, outFile, modelFile, configFile, line = "", level = "full", dtype = "float32", compute = "float64", seed = "-1"] =
  process.argv.slice(2);
const config = JSON.parse(fs.readFileSync(configFile, "utf8"));
const D = config.n_embd, H = config.n_head, K = D / H, L = config.n_layer, V = config.vocab_size;
const Numbers = compute === "float32" ? Float32Array : Float64Array;
const round = compute === "float32" ? Math.fround : (x) => x;

// Faults: word -> places; none means everywhere.
const faults = new Map(line.split(" ").filter(Boolean).map((word) => [word.split("@")[0], (word.split("@")[1] || "").split(",").filter(Boolean)]));
function has(name, place = "") {
  const sites = faults.get(name);
  return sites !== undefined && (!sites.length || sites.some((site) => `${place}.`.startsWith(site + ".")));
}

// Files.
function readSafetensors(file) {
  const bytes = fs.readFileSync(file), size = Number(bytes.readBigUInt64LE(0)), found = {};
  for (const [name, entry] of Object.entries(JSON.parse(bytes.toString("utf8", 8, 8 + size)))) {
    if (name === "__metadata__") continue;
    const [from, to] = entry.data_offsets, values = new Numbers((to - from) / 4);
    for (let i = 0; i < values.length; i++) values[i] = bytes.readFloatLE(8 + size + from + 4 * i);
    found[name] = values;
  }
  return found;
}

function toHalf(x) {
  // The bits of the nearest float16, ties to even.
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0, size = Math.abs(x);
  if (Number.isNaN(x)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  const exponent = Math.max(Math.floor(Math.log2(size)), -14), unit = 2 ** (exponent - 10);
  let steps = size / unit, whole = Math.floor(steps);
  if (steps - whole > 0.5 || (steps - whole === 0.5 && whole % 2)) whole++;
  return sign | (whole + (exponent + 14) * 1024);
}

const WRITE = {
  float16: [2, "F16", (bytes, x, at) => bytes.writeUInt16LE(toHalf(x), at)],
  float32: [4, "F32", (bytes, x, at) => bytes.writeFloatLE(x, at)],
  float64: [8, "F64", (bytes, x, at) => bytes.writeDoubleLE(x, at)],
};

function writeSafetensors(file, tensors) {
  const header = {}, parts = [];
  let offset = 0;
  for (const [name, { shape, values, ints }] of tensors) {
    const [size, code, put] = ints ? [4, "I32", (bytes, x, at) => bytes.writeInt32LE(x, at)] : WRITE[dtype];
    const bytes = Buffer.alloc(size * values.length);
    values.forEach((x, i) => put(bytes, x, i * size));
    header[name] = { dtype: code, shape, data_offsets: [offset, offset + bytes.length] };
    offset += bytes.length;
    parts.push(bytes);
  }
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (text.length % 8)) % 8);
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  fs.writeFileSync(file, Buffer.concat([size, Buffer.from(text), ...parts]));
}

const dump = new Map();
const RANK = { logits: 0, block: 1, full: 2 };
function keep(rank, name, shape, values, ints = false) {
  if (rank > RANK[level]) return;
  while (dump.has(name)) name += "_again";
  dump.set(name, { shape, values: Array.from(values), ints });
}
const keepRows = (rank, name, rows) => keep(rank, name, [rows.length, rows[0].length], rows.flatMap((row) => Array.from(row)));

// The file, read with its author's mistakes.
function bfloat16(values) {
  const floats = Float32Array.from(values), bits = new Uint32Array(floats.buffer);
  for (let i = 0; i < bits.length; i++) bits[i] = ((bits[i] + 0x7fff + ((bits[i] >>> 16) & 1)) & 0xffff0000) >>> 0;
  return Numbers.from(floats);
}

function turned(w, n) {
  return w.map((_, i) => w[(i % n) * n + Math.floor(i / n)]);
}

function readModel() {
  const w = readSafetensors(modelFile), right = { ...w };
  const zeros = (values) => new Numbers(values.length);
  for (let l = 0; l < L; l++) {
    const at = `h.${l}.`, near = `h.${(l + 1) % L}.`;
    for (const leaf of ["weight", "bias"]) {
      const fused = right[`${at}attn.c_attn.${leaf}`], rows = fused.length / (3 * D);
      const third = (n) => new Numbers(rows * D).map((_, i) => fused[Math.floor(i / D) * 3 * D + n * D + (i % D)]);
      let parts = [third(0), third(1), third(2)];
      if (has("qkv-kqv", l)) parts = [parts[1], parts[0], parts[2]];
      if (has("qkv-vkq", l)) parts = [parts[2], parts[1], parts[0]];
      if (has("transposed-q", l) && leaf === "weight") parts[0] = turned(parts[0], D);
      if (has("head-columns", l)) parts = parts.map((p) => p.map((_, i) => p[i - (i % D) + (i % K) * H + Math.floor((i % D) / K)]));
      ["q", "k", "v"].forEach((letter, n) => (w[`${at}${letter}.${leaf}`] = parts[n]));
      if (leaf === "bias" && has("no-qkv-bias", l)) for (const letter of "qkv") w[`${at}${letter}.bias`] = new Numbers(D);
      if (has("wrong-fc", l)) w[`${at}mlp.c_fc.${leaf}`] = right[`${near}mlp.c_fc.${leaf}`];
      if (has("wrong-ln_1", l) || has("norm-weights-swapped", l)) w[`${at}ln_1.${leaf}`] = right[`${at}ln_2.${leaf}`];
      if (has("norm-weights-swapped", l)) w[`${at}ln_2.${leaf}`] = right[`${at}ln_1.${leaf}`];
    }
    if (has("transposed-proj", l)) w[`${at}attn.c_proj.weight`] = turned(right[`${at}attn.c_proj.weight`], D);
    if (has("no-out-bias", l)) w[`${at}attn.c_proj.bias`] = zeros(right[`${at}attn.c_proj.bias`]);
    if (has("no-fc-bias", l)) w[`${at}mlp.c_fc.bias`] = zeros(right[`${at}mlp.c_fc.bias`]);
    if (has("wrong-bias", l)) w[`${at}attn.c_proj.bias`] = right[`${at}mlp.c_proj.bias`];
    if (has("not-loaded-ln_2", l)) [w[`${at}ln_2.weight`], w[`${at}ln_2.bias`]] = [new Numbers(D).fill(1), new Numbers(D)];
    if (has("gamma-beta", l)) [w[`${at}ln_1.weight`], w[`${at}ln_1.bias`]] = [right[`${at}ln_1.bias`], right[`${at}ln_1.weight`]];
    if (has("bf16-fc", l)) w[`${at}mlp.c_fc.weight`] = bfloat16(right[`${at}mlp.c_fc.weight`]);
  }
  if (has("wpe-rolled")) w["wpe.weight"] = right["wpe.weight"].map((_, i, all) => all[(i - D + all.length) % all.length]);
  if (has("bf16-on-the-way")) for (const name of Object.keys(w)) w[name] = bfloat16(w[name]);
  return w;
}

// Arithmetic on one token's vector.
const w = readModel();
const add = (a, b, factor = 1) => a.map((x, i) => x + factor * b[i]);

function linear(x, name) {
  const weight = w[name + ".weight"], bias = w[name + ".bias"], out = new Numbers(bias.length);
  for (let o = 0; o < out.length; o++) {
    let sum = bias[o];
    for (let i = 0; i < x.length; i++) sum += x[i] * weight[i * out.length + o];
    out[o] = sum;
  }
  return out;
}

function norm(x, name, place) {
  const g = name && w[name + ".weight"], b = name && w[name + ".bias"], rms = has("rmsnorm", place);
  if (name && has("not-normalising", place)) return x.map((value, i) => value * g[i] + b[i]);
  const mean = rms ? 0 : x.reduce((sum, value) => sum + value, 0) / D;
  let variance = 0;
  for (const value of x) variance += (value - mean) ** 2;
  variance /= has("unbiased", place) ? D - 1 : D;
  const eps = { "eps-1e-6": 1e-6, "eps-1e-12": 1e-12, "eps-1e-3": 1e-3, "eps-none": 0 };
  const named = Object.keys(eps).find((word) => has(word, place));
  const deviation = has("eps-outside", place) ? Math.sqrt(variance) + 1e-5 : Math.sqrt(variance + (named ? eps[named] : 1e-5));
  return x.map((value, i) => ((value - mean) / deviation) * (name && !has("no-affine", place) ? g[i] : 1) + (name && !has("no-affine", place) ? b[i] : 0));
}

function erf(x) {
  // The series near zero, a continued fraction far from it: 1e-15.
  const z = Math.abs(x);
  if (z < 3) {
    let term = z, sum = z;
    for (let n = 1; n < 200 && Math.abs(term) > 1e-18; n++) {
      term *= (-z * z) / n;
      sum += term / (2 * n + 1);
    }
    return Math.sign(x) * (2 / Math.sqrt(Math.PI)) * sum;
  }
  let fraction = 0;
  for (let n = 60; n > 0; n--) fraction = n / 2 / (z + fraction);
  return Math.sign(x) * (1 - Math.exp(-z * z) / Math.sqrt(Math.PI) / (z + fraction));
}

function gelu(x, l) {
  if (has("gelu-erf", l)) return 0.5 * x * (1 + erf(x / Math.SQRT2));
  if (has("gelu-quick", l)) return x / (1 + Math.exp(-1.702 * x));
  if (has("gelu-silu", l)) return x / (1 + Math.exp(-x));
  if (has("gelu-relu", l)) return Math.max(x, 0);
  if (has("gelu-none", l)) return x;
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

// One head of one token: its scores over all tokens, which of them it sees, and their weights.
function weigh(q, keys, t, l) {
  let divisor = Math.sqrt(has("scale-by-width", l) ? D : has("scale-by-heads", l) ? H : K);
  if (has("scale-missing", l)) divisor = 1;
  if (has("scale-twice", l)) divisor = K;
  if (has("scale-inverse-layer", l)) divisor *= l + 1;
  const last = has("mask-missing", l) ? keys.length : has("mask-strict", l) ? t - 1 : has("mask-off-by-one", l) ? t + 1 : t;
  const scores = Numbers.from(keys, (k) => q.reduce((sum, value, i) => sum + value * k[i], 0) / divisor);
  if (has("softmax-missing", l)) return [scores, scores.map((x, s) => (s <= last ? x : 0))];
  const masked = scores.map((x, s) => (s <= last ? x : has("mask-multiplied", l) ? 0 : -1e10));
  const top = Math.max(...masked), raised = masked.map((x) => Math.exp(x - top));
  const total = raised.reduce((sum, x) => sum + x, 0);
  return [scores, raised.map((x) => x / total)];
}

function attention(stream, l) {
  const at = `h.${l}.`, T = stream.length;
  const [q, k, v] = ["q", "k", "v"].map((letter) => stream.map((x) => linear(x, at + letter)));
  const source = has("value-from-key", l) ? k : has("value-from-query", l) ? q : has("value-identity", l) ? stream : v;
  const scores = [], weights = [], mixed = stream.map(() => new Numbers(D));
  for (let h = 0; h < H; h++) {
    const part = (row) => row.subarray(h * K, (h + 1) * K), keys = k.map(part);
    for (let t = 0; t < T; t++) {
      const [s, p] = weigh(part(q[t]), keys, t, l);
      scores.push(...s), weights.push(...p);
      for (let i = 0; i < K; i++) {
        let sum = 0;
        for (let j = 0; j < T; j++) sum += p[j] * source[j][h * K + i];
        const flat = (h * T + t) * K + i;
        if (has("heads-merged-wrongly", l)) mixed[Math.floor(flat / D)][flat % D] = sum;
        else mixed[t][h * K + i] = sum;
      }
    }
  }
  const keysTurned = [];
  for (let i = 0; i < D; i++) for (let t = 0; t < T; t++) keysTurned.push(k[t][i]);
  keepRows(2, `layers[${l}].q`, q), keep(2, `layers[${l}].kT`, [H, K, T], keysTurned), keepRows(2, `layers[${l}].v`, source);
  keep(2, `layers[${l}].scores`, [H, T, T], scores), keep(2, `layers[${l}].probs`, [H, T, T], weights);
  keepRows(2, `layers[${l}].mix`, mixed);
  const out = has("output-projection-missing", l) ? mixed : mixed.map((y) => linear(y, at + "attn.c_proj"));
  keepRows(2, `layers[${l}].attnOut`, out);
  return out;
}

function feedForward(stream, l) {
  const up = stream.map((x) => linear(x, `h.${l}.mlp.c_fc`)), act = up.map((x) => x.map((value) => gelu(value, l)));
  const down = act.map((x) => linear(x, `h.${l}.mlp.c_proj`));
  keepRows(2, `layers[${l}].up`, up), keepRows(2, `layers[${l}].act`, act), keepRows(2, `layers[${l}].down`, down);
  return down;
}

function block(x, l) {
  const ln = (stream, n) => {
    const out = stream.map((row) => norm(row, `h.${l}.ln_${n}`, `${l}.ln_${n}`));
    keepRows(2, `layers[${l}].norm${n}`, out);
    return out;
  };
  const sum = (a, b, factor = 1) => a.map((row, t) => add(row, b[t], factor));
  const [one, two] = has("norms-swapped", l) ? [2, 1] : [1, 2];
  if (has("post-norm", l)) {
    x = ln(sum(x, attention(x, l)), one);
    return ln(sum(x, feedForward(x, l)), two);
  }
  let y = has("ln_1-missing", l) ? x : ln(x, one);
  const branch = attention(y, l), normed = has("residual-from-normed", l);
  if (has("parallel", l)) return sum(sum(x, branch), feedForward(ln(x, two), l));
  const mid = has("residual-missing", l) || has("residual-missing-attn", l) ? branch : sum(normed ? y : x, branch);
  keepRows(2, `layers[${l}].mid`, mid);
  y = has("ln_2-missing", l) ? mid : ln(mid, two);
  const down = feedForward(y, l);
  if (has("residual-missing", l) || has("residual-missing-mlp", l)) return down;
  return sum(normed || has("residual-from-normed-mlp", l) ? y : mid, down, has("residual-halved", l) ? 0.5 : 1);
}

function forward(ids) {
  let x = ids.map((id, t) => {
    const token = w["wte.weight"].subarray(id * D, (id + 1) * D).map((e) => e * (has("embedding-scaled") ? round(Math.sqrt(D)) : 1));
    const row = t + (has("position-offset") ? 1 : 0);
    if (has("position-missing")) return token;
    const wave = (i) => (i % 2 ? Math.cos : Math.sin)(t / 10000 ** ((i - (i % 2)) / D));
    return token.map((e, i) => e + (has("position-sinusoidal") ? wave(i) : w["wpe.weight"][row * D + i]));
  });
  if (has("extra-norm-embed")) x = x.map((row) => norm(row, "", "-"));
  keepRows(2, "embedding", x);
  let order = [...Array(L).keys()];
  if (has("layer-reversed")) order.reverse();
  if (has("layer-swapped")) order.splice(L - 2, 2, L - 1, L - 2);
  order = order.filter((l) => !has("layer-missing", l)).flatMap((l) => (has("layer-repeated", l) ? [l, l] : [l]));
  for (const l of order) {
    x = block(x, l);
    keepRows(1, `layers[${l}].out`, x);
  }
  if (!has("final-norm-missing")) {
    x = x.map((row) => norm(row, "ln_f", "f"));
    keepRows(1, "lastNorm", x);
  }
  const head = (v, i) => (has("untied-head") ? round(0.02 * Math.sin(v * D + i)) : w["wte.weight"][v * D + i]);
  const logits = x.map((row) => {
    const out = new Numbers(V);
    for (let v = 0; v < V; v++) out[v] = row.reduce((sum, value, i) => sum + value * head(v, i), 0);
    if (has("logits-scaled")) return out.map((value) => value / Math.sqrt(D));
    const total = Math.log(out.reduce((sum, value) => sum + Math.exp(value), 0));
    if (has("logits-softmaxed")) return out.map((value) => Math.exp(value - total));
    return has("logits-log-softmaxed") ? out.map((value) => value - total) : out;
  });
  keepRows(0, "y", logits);
}

function foreign(T, seed) {
  let state = seed;
  const draw = () => ((state = (Math.imul(state, 1664525) + 1013904223) >>> 0), state / 2 ** 32 - 0.5);
  const values = (n, make) => Array.from({ length: n }, (_, i) => make(i));
  keep(0, "bias", [1, 1, T, T], values(T * T, (i) => (i % T <= Math.floor(i / T) ? 1 : 0)));
  keep(0, "random", [T, D], values(T * D, draw));
  keep(0, "pos", [T], values(T, (i) => i), true);
  keep(0, "time", [], [1.25]);
}

const ids = fs.readFileSync(idsFile, "utf8").split("\n")[0].trim().split(/\s+/).map(Number);
keep(0, "ids", [ids.length], ids, true);
forward(ids);
if (Number(seed) >= 0) foreign(ids.length, Number(seed));
writeSafetensors(outFile, dump);
