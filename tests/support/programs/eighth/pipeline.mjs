// GPT-2 over a small tensor class on typed arrays: node pipeline.mjs MODEL.safetensors IDS OUT FAULTS HEADS DTYPE
// IDS has a line of numbers for each row; OUT is a folder of .npy files. The mistakes to switch on: see SOURCES.md.
import fs from "node:fs";

const [modelFile, idsFile, folder, given, headsText, dtype] = process.argv.slice(2);
const faults = new Set(given.split(";"));
const on = (fault) => faults.has(fault);
const Floats = dtype === "float64" ? Float64Array : Float32Array;
const count = (shape) => shape.reduce((product, size) => product * size, 1);

class Tensor {
  constructor(data, shape) { this.data = data; this.shape = shape; }
  reshape(...shape) { return new Tensor(this.data, shape); }
  map(f) { return new Tensor(this.data.map(f), this.shape); }
  permute(...order) { // a copy
    const shape = order.map((axis) => this.shape[axis]), strides = order.map((axis) => count(this.shape.slice(axis + 1)));
    const out = new Floats(this.data.length), at = shape.map(() => 0);
    for (let i = 0; i < out.length; i++) {
      out[i] = this.data[at.reduce((sum, index, axis) => sum + index * strides[axis], 0)];
      for (let axis = at.length - 1; axis >= 0 && ++at[axis] === shape[axis]; axis--) at[axis] = 0;
    }
    return new Tensor(out, shape);
  }
  plus(other) { // other's shape is the end of this one's
    const n = other.data.length;
    return new Tensor(this.data.map((value, i) => value + other.data[i % n]), this.shape);
  }
  times(other) { // over the last axis of this one and the one before the last of other, which may have the same first axes
    const inner = this.shape.at(-1), columns = other.shape.at(-1), rows = this.data.length / inner;
    const each = other.shape.length > 2 ? this.shape.at(-2) : rows, out = new Floats(rows * columns);
    for (let r = 0; r < rows; r++) {
      const base = Math.floor(r / each) * inner * columns;
      for (let c = 0; c < columns; c++) {
        let sum = 0;
        for (let i = 0; i < inner; i++) sum += this.data[r * inner + i] * other.data[base + i * columns + c];
        out[r * columns + c] = sum;
      }
    }
    return new Tensor(out, [...this.shape.slice(0, -1), columns]);
  }
  softmax() {
    const n = this.shape.at(-1), out = new Floats(this.data.length);
    for (let start = 0; start < out.length; start += n) {
      const row = this.data.subarray(start, start + n), most = Math.max(...row), raised = Array.from(row, (v) => Math.exp(v - most));
      const sum = raised.reduce((a, b) => a + b, 0);
      raised.forEach((value, i) => { out[start + i] = value / sum; });
    }
    return new Tensor(out, this.shape);
  }
  dump(name) {
    const head = `{'descr': '<f${this.data.BYTES_PER_ELEMENT}', 'fortran_order': False, 'shape': (${this.shape.join(", ")},)}`;
    const start = Buffer.from("\x93NUMPY\x01\x00\x76\x00" + head.padEnd(117) + "\n", "latin1");
    fs.writeFileSync(`${folder}/${name}.npy`, Buffer.concat([start, Buffer.from(this.data.buffer, this.data.byteOffset, this.data.byteLength)]));
    return this;
  }
}

const bytes = fs.readFileSync(modelFile), start = 8 + Number(bytes.readBigUInt64LE(0));
const header = JSON.parse(bytes.toString("utf8", 8, start));
function load(name) {
  const { shape, data_offsets: [begin, end] } = header[name], out = new Floats((end - begin) / 4);
  for (let i = 0; i < out.length; i++) out[i] = bytes.readFloatLE(start + begin + 4 * i);
  return new Tensor(out, shape);
}
const rows = fs.readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));
const wte = load("wte.weight"), wpe = load("wpe.weight");
const B = rows.length, T = rows[0].length, [V, C] = wte.shape, H = Number(headsText), D = C / H;
const L = Object.keys(header).filter((name) => name.endsWith("ln_1.weight")).length;

function norm(x, name) {
  const gain = load(`${name}.weight`).data, bias = load(`${name}.bias`).data, out = new Floats(x.data.length);
  const overTokens = on("norm over tokens"), n = overTokens ? T : C;
  const first = (group) => (overTokens ? Math.floor(group / C) * T * C + (group % C) : group * C), step = overTokens ? C : 1;
  for (let group = 0; group < out.length / n; group++) {
    let mean = 0, sum = 0;
    for (let i = 0; i < n; i++) mean += x.data[first(group) + i * step] / n;
    for (let i = 0; i < n; i++) sum += (x.data[first(group) + i * step] - mean) ** 2;
    let below = Math.sqrt(sum / (overTokens ? n - 1 : n) + 1e-5);
    if (on("n-1 and eps outside")) below = Math.sqrt(sum / (n - 1)) + 1e-6;
    if (on("eps outside the root")) below = Math.sqrt(sum / n) + 1e-5;
    for (let i = 0; i < n; i++) {
      const place = first(group) + i * step, at = on("one gain and bias") ? 0 : place % C;
      const normed = on("input scaled and shifted") ? x.data[place] : (x.data[place] - mean) / below;
      out[place] = gain[at] * normed + bias[at];
    }
  }
  return new Tensor(out, x.shape);
}

function linear(x, weight, bias) {
  const out = x.times(weight);
  return on("no biases") ? out : out.plus(bias);
}

function erf(x) { // by its series, and by a continued fraction where that is slow
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size < 3) {
    let term = size, sum = size;
    for (let n = 1; Math.abs(term) > 1e-18 * sum; n++) { term *= -size * size / n; sum += term / (2 * n + 1); }
    return Math.sign(x) * 2 / Math.sqrt(Math.PI) * sum;
  }
  let below = size;
  for (let n = 60; n > 0; n--) below = size + n / 2 / below;
  return Math.sign(x) * (1 - Math.exp(-size * size) / Math.sqrt(Math.PI) / below);
}

function activation(v) {
  if (on("relu")) return Math.max(0, v);
  if (on("erf")) return 0.5 * v * (1 + erf(v / Math.SQRT2));
  if (on("sigmoid of 1.702 x")) return v / (1 + Math.exp(-1.702 * v));
  return 0.5 * v * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (v + 0.044715 * v ** 3)));
}

function thirds(name) { // c_attn's three matrices and biases, each [C, C] and [C]
  const weight = load(`${name}.weight`), bias = load(`${name}.bias`);
  const cut = (whole) => {
    const outer = count(whole.shape.slice(0, -1));
    if (on("thirds in heads")) return whole.reshape(outer, H, 3, D).permute(2, 0, 1, 3).reshape(3, outer, C);
    return whole.reshape(outer, 3, C).permute(1, 0, 2);
  };
  const pick = (whole, third, shape) => new Tensor(whole.data.subarray(third * count(shape), (third + 1) * count(shape)), shape);
  return [0, 1, 2].map((third) => {
    const from = on("all from the queries") ? 0 : third;
    return [pick(cut(weight), from, [C, C]), pick(cut(bias), from, [C])];
  });
}

function attention(x, name, layer) {
  const [q, k, v] = thirds(`${name}.c_attn`).map(([weight, bias], third) => {
    return linear(x, weight, bias).reshape(B, T, H, D).permute(0, 2, 1, 3).dump(`${layer} ${"qkv"[third]}`);
  });
  const divisor = on("unscaled") ? 1 : Math.sqrt(on("scaled by width") ? C : D);
  let scores = q.times(k.permute(0, 1, 3, 2)).map((value) => value / divisor).dump(`${layer} scores`);
  const hidden = (i) => (i % T) > (Math.floor(i / T) % T) - (on("not itself") ? 1 : 0);
  if (on("scores times the mask")) scores = scores.map((value, i) => (hidden(i) ? 0 : value));
  else if (!on("no mask")) scores = scores.map((value, i) => (hidden(i) ? -1e10 : value));
  const overQueries = on("softmax over queries");
  const weights = (overQueries ? scores.permute(0, 1, 3, 2).softmax().permute(0, 1, 3, 2) : scores.softmax()).dump(`${layer} weights`);
  let mixed = weights.times(v);
  mixed = (on("merged by view") ? mixed : mixed.permute(0, 2, 1, 3)).reshape(B, T, C).dump(`${layer} mixed`);
  const weight = load(`${name}.c_proj.weight`);
  if (on("no output projection")) return mixed;
  if (on("projection added to its input")) return mixed.plus(mixed.times(weight));
  return linear(mixed, weight, load(`${name}.c_proj.bias`));
}

function feedForward(x, name, layer) {
  const [up, down] = ["c_fc", "c_proj"].map((leaf) => {
    const weight = load(`${name}.${leaf}.weight`), [inputs, outputs] = weight.shape;
    return on("feed-forward not turned") ? weight.reshape(outputs, inputs).permute(1, 0) : weight; // taken for [out, in]
  });
  const before = linear(x, up, load(`${name}.c_fc.bias`)).dump(`${layer} up`);
  return linear(before.map(activation).dump(`${layer} act`), down, load(`${name}.c_proj.bias`));
}

function block(x, layer) {
  const name = `h.${layer}`;
  if (on("norms after the sums")) {
    const middle = norm(x.plus(attention(x, `${name}.attn`, layer).dump(`${layer} attended`)), `${name}.ln_1`).dump(`${layer} middle`);
    return norm(middle.plus(feedForward(middle, `${name}.mlp`, layer).dump(`${layer} fed`)), `${name}.ln_2`);
  }
  const first = norm(x, `${name}.ln_1`).dump(`${layer} ln_1`);
  const attended = attention(first, `${name}.attn`, layer).dump(`${layer} attended`);
  const sum = (stream, normed, branch) => (on("no residuals") ? branch : (on("sums with the norms") ? normed : stream).plus(branch));
  const middle = sum(x, first, attended).dump(`${layer} middle`);
  const second = norm(middle, `${name}.ln_2`).dump(`${layer} ln_2`);
  return sum(middle, second, feedForward(second, `${name}.mlp`, layer).dump(`${layer} fed`));
}

fs.mkdirSync(folder, { recursive: true });
const embedded = new Tensor(new Floats(B * T * C), [B, T, C]);
for (let i = 0; i < B * T * C; i++) {
  const row = Math.floor(i / C), t = row % T, at = on("all at position 0") ? 0 : on("positions go on") ? T + t : t;
  embedded.data[i] = wte.data[rows[Math.floor(row / T)][t] * C + (i % C)] + wpe.data[at * C + (i % C)];
}
embedded.dump("x embedded");
let x = embedded;
for (let layer = 0; layer < L; layer++) x = block(on("each block sees the embedding") ? embedded : x, layer).dump(`${layer} result`);
if (!on("no final norm")) x = norm(x, "ln_f").dump("x final");
const logits = x.times(wte.permute(1, 0));
(on("softmax at the end") ? logits.softmax() : logits).dump("logits");
