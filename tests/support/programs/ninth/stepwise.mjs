// GPT-2 in node: one token at a time on typed arrays, with a cache of keys and values for each layer.
// Usage: node stepwise.mjs model.safetensors ids.txt out-folder ";fault;fault;" heads float32|float64
import fs from "node:fs";

const [modelPath, idsPath, out, faultList, headText, dtype] = process.argv.slice(2);
const fault = (name) => faultList.includes(`;${name};`);
const Real = dtype === "float64" ? Float64Array : Float32Array;
const H = parseInt(headText, 10);

function loadSafetensors(path) {
  const file = fs.readFileSync(path);
  const length = Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.toString("utf8", 8, 8 + length));
  const tensors = {};
  for (const [name, info] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [begin, end] = info.data_offsets;
    const bytes = file.buffer.slice(file.byteOffset + 8 + length + begin, file.byteOffset + 8 + length + end);
    tensors[name] = { data: Real.from(new Float32Array(bytes)), shape: info.shape };
  }
  return tensors;
}

const tensors = loadSafetensors(modelPath);
const [vocab, D] = tensors["wte.weight"].shape;
const context = tensors["wpe.weight"].shape[0];
const wte = tensors["wte.weight"].data, wpe = tensors["wpe.weight"].data;
const layers = 1 + Math.max(...Object.keys(tensors).filter((n) => n.startsWith("h.")).map((n) => Number(n.split(".")[1])));
const K = D / H;

const rows = fs.readFileSync(idsPath, "utf8").trim().split("\n").map((line) => line.trim().split(" ").map(Number));
const T = rows[0].length;
const kept = new Map();

function keep(name, values, row, token) {
  if (!kept.has(name)) kept.set(name, { size: values.length, data: new Real(rows.length * T * values.length) });
  kept.get(name).data.set(values, (row * T + token) * values.length);
}

function linear(x, name, n, asLinear = false) {
  const { data: w } = tensors[`${name}.weight`];
  const none = fault("no biases") || (fault("no bias of c_attn, first layer") && name === "h.0.attn.c_attn") ||
    (fault("no bias of the mlp's c_proj") && name.endsWith("mlp.c_proj"));
  const y = none ? new Real(n) : tensors[`${name}.bias`].data.slice();
  for (let i = 0; i < x.length; i++) {
    for (let o = 0; o < n; o++) y[o] += x[i] * w[asLinear ? o * x.length + i : i * n + o];
  }
  return y;
}

function norm(x, name, into = new Real(D)) {
  const mean = fault("rms") ? 0 : x.reduce((a, b) => a + b, 0) / D;
  let variance = 0;
  for (const value of x) variance += (value - mean) ** 2;
  variance /= fault("n - 1") ? D - 1 : D;
  const inverse = 1 / Math.sqrt(variance + (fault("eps 1e-3") ? 1e-3 : 1e-5));
  const missing = fault("default ln_2, last layer") && name === `h.${layers - 1}.ln_2`;
  const gain = tensors[`${name}.weight`].data, bias = tensors[`${name}.bias`].data;
  for (let i = 0; i < D; i++) into[i] = (x[i] - mean) * inverse * (missing ? 1 : gain[i]) + (missing ? 0 : bias[i]);
  return into;
}

function activation(x) {
  if (fault("no activation")) return x;
  if (fault("relu")) return Math.max(0, x);
  if (fault("sigmoid gelu")) return x / (1 + Math.exp(-1.702 * x));
  const c = Math.sqrt(fault("root of 2 pi") ? 2 * Math.PI : 2 / Math.PI);
  return 0.5 * x * (1 + Math.tanh(c * (x + 0.044715 * x ** 3)));
}

function attention(x, layer, name, t, cache, show) {
  const qkv = linear(x, `${name}.attn.c_attn`, 3 * D);
  show("qkv", qkv);
  const pick = (third) => {
    const part = new Real(D);
    for (let h = 0; h < H; h++) {
      for (let i = 0; i < K; i++) {
        let from = third * D + h * K + i;
        if (fault("thirds inside heads")) from = h * 3 * K + third * K + i;
        if (fault("strided heads")) from = third * D + i * H + h;
        part[h * K + i] = qkv[from];
      }
    }
    return part;
  };
  const swapped = fault("k q v");
  const q = pick(swapped ? 1 : 0), k = pick(swapped ? 0 : 1), v = pick(2);
  show("q", q), show("k", k), show("v", v);
  const slot = cache[fault("one cache for all layers") ? 0 : layer];
  slot.k.set(k, t * D);
  slot.v.set(fault("keys cached as values") ? k : v, t * D);
  let scale = 1 / Math.sqrt(K);
  if (fault("no scale")) scale = 1;
  if (fault("times the root")) scale = Math.sqrt(K);
  if (fault("root of the width")) scale = 1 / Math.sqrt(D);
  const seen = fault("empty slots too") ? context : fault("no own key") ? t : t + 1;
  const mixed = new Real(D), shown = new Real(H * T);
  for (let h = 0; h < H; h++) {
    const weights = new Real(seen);
    for (let u = 0; u < seen; u++) {
      for (let i = 0; i < K; i++) weights[u] += q[h * K + i] * slot.k[u * D + h * K + i];
      weights[u] *= scale;
    }
    const top = weights.reduce((a, b) => Math.max(a, b), -Infinity);
    const sum = weights.reduce((a, b) => a + Math.exp(b - top), 0);
    for (let u = 0; u < seen; u++) {
      weights[u] = Math.exp(weights[u] - top) / sum;
      const to = fault("strided heads") ? (i) => i * H + h : (i) => h * K + i;
      for (let i = 0; i < K; i++) mixed[to(i)] += weights[u] * slot.v[u * D + h * K + i];
    }
    shown.set(weights.subarray(0, T), h * T);
  }
  show("weights", shown), show("mixed", mixed);
  if (fault("no attention projection")) return mixed;
  return linear(mixed, `${name}.attn.c_proj`, D, fault("c_proj as linear"));
}

function mlp(x, name, show) {
  const up = linear(x, `${name}.mlp.c_fc`, 4 * D);
  show("up", up);
  const act = up.map(activation);
  show("act", act);
  return linear(act, `${name}.mlp.c_proj`, D, fault("mlp's c_proj as linear"));
}

const add = (a, b) => a.map((value, i) => value + b[i]);

function block(x, layer, t, cache, show) {
  const name = `h.${fault("last block's weights") ? layers - 1 : layer}`;
  if (fault("norm after the sum")) {
    const middle = norm(add(x, attention(x, layer, name, t, cache, show)), `${name}.ln_1`);
    show("middle", middle);
    return norm(add(middle, mlp(middle, name, show)), `${name}.ln_2`);
  }
  const before = x.slice();
  const normed = fault("norm into the stream") ? norm(x, `${name}.ln_1`, x) : norm(x, `${name}.ln_1`);
  show("ln_1", normed);
  const attended = attention(normed, layer, name, t, cache, show);
  show("attended", attended);
  if (fault("skip is no copy")) x.set(attended);
  const middle = add(x, attended);
  show("middle", middle);
  const second = norm(fault("mlp beside attention") ? before : middle, `${name}.${fault("ln_1 for both") ? "ln_1" : "ln_2"}`);
  show("ln_2", second);
  const fed = mlp(second, name, show);
  show("fed", fed);
  return fault("no mlp residual") ? fed : add(middle, fed);
}

function step(id, t, row, cache) {
  let x = wte.slice(id * D, (id + 1) * D);
  const position = fault("position never counted") ? 0 : fault("wpe from 1") ? t + 1 : t;
  if (!fault("no wpe")) x = add(x, wpe.subarray(position * D, (position + 1) * D));
  keep("x embedded", x, row, t);
  for (let layer = 0; layer < layers; layer++) {
    const show = (part, values) => keep(`${layer} ${part}`, values, row, t);
    x = block(x, layer, t, cache, show);
    show("result", x);
  }
  if (!fault("no ln_f")) x = norm(x, "ln_f");
  keep("x final", x, row, t);
  const logits = new Real(vocab);
  for (let word = 0; word < vocab; word++) {
    for (let i = 0; i < D; i++) logits[word] += x[i] * wte[word * D + i];
  }
  keep("logits", fault("temperature") ? logits.map((value) => value / 0.8) : logits, row, t);
}

function writeNpy(name, size, data) {
  const shape = name.endsWith(" weights") ? [rows.length, T, H, T] : [rows.length, T, size];
  const header = `{'descr': '${dtype === "float64" ? "<f8" : "<f4"}', 'fortran_order': False, 'shape': (${shape.join(", ")})}`;
  const start = Buffer.from("\x93NUMPY\x01\x00\x76\x00" + header.padEnd(117) + "\n", "latin1");
  fs.writeFileSync(`${out}/${name}.npy`, Buffer.concat([start, Buffer.from(data.buffer)]));
}

rows.forEach((ids, row) => {
  const cache = Array.from({ length: layers }, () => ({ k: new Real(context * D), v: new Real(context * D) }));
  ids.forEach((id, t) => step(id, t, row, cache));
});
for (const [name, { size, data }] of kept) writeNpy(name, size, data);
