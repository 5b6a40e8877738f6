// GPT-2 over typed arrays, the whole batch at once: node port.js MODEL.safetensors IDS OUT FAULTS HEADS DTYPE
// IDS has a line of numbers for each row. OUT is a folder of .npy files. Mistakes to switch on: see SOURCES.md.
"use strict";
const fs = require("fs");

const [modelFile, idsFile, folder, given, headsText, dtype] = process.argv.slice(2);
const faults = new Set(given.split(";"));
const on = (fault) => faults.has(fault);
const Floats = dtype === "float64" ? Float64Array : Float32Array;

const bytes = fs.readFileSync(modelFile);
const headerSize = Number(bytes.readBigUInt64LE(0));
const header = JSON.parse(bytes.toString("utf8", 8, 8 + headerSize));
function tensor(name) {
  const [begin, end] = header[name].data_offsets;
  const data = bytes.subarray(8 + headerSize + begin, 8 + headerSize + end);
  const out = new Floats((end - begin) / 4);
  for (let i = 0; i < out.length; i++) out[i] = data.readFloatLE(4 * i);
  if (on("bfloat16 weights")) for (let i = 0; i < out.length; i++) out[i] = bfloat16(out[i]);
  return out;
}

const scratch = new DataView(new ArrayBuffer(4));
function bfloat16(value) { // the upper half of a float32, cut off
  scratch.setFloat32(0, value);
  scratch.setUint16(2, 0);
  return scratch.getFloat32(0);
}

const rows = fs.readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));
const B = rows.length, T = rows[0].length, ids = rows.flat();
const [V, C] = header["wte.weight"].shape;
const L = Object.keys(header).filter((name) => name.endsWith("ln_1.weight")).length;
const NH = on("twice the heads") ? 2 * Number(headsText) : Number(headsText), HS = C / NH;

fs.mkdirSync(folder, { recursive: true });
function dump(name, x, shape) {
  const head = `{'descr': '<f${x.BYTES_PER_ELEMENT}', 'fortran_order': False, 'shape': (${shape.join(", ")},)}`;
  const start = Buffer.from("\x93NUMPY\x01\x00\x76\x00" + head.padEnd(117) + "\n", "latin1");
  fs.writeFileSync(`${folder}/${name}.npy`, Buffer.concat([start, Buffer.from(x.buffer, x.byteOffset, x.byteLength)]));
}

function layerNorm(x, weight, bias) {
  const out = new Floats(x.length);
  const eps = on("epsilon is a flag") ? 1 : 1e-5;
  for (let row = 0; row < B * T; row++) {
    let mean = 0, variance = 0;
    for (let i = 0; i < C; i++) mean += x[row * C + i];
    mean /= C;
    for (let i = 0; i < C; i++) variance += (x[row * C + i] - mean) ** 2;
    variance /= C;
    let below = Math.sqrt(variance + eps);
    if (on("no root in the norm")) below = variance + eps;
    if (on("root of the deviation")) below = Math.sqrt(Math.sqrt(variance) + eps);
    for (let i = 0; i < C; i++) {
      const n = (x[row * C + i] - mean) / below;
      out[row * C + i] = on("norm without parameters") ? n : n * weight[i] + bias[i];
    }
  }
  return out;
}

function linear(x, weight, bias, inputs, outputs, turned = false) {
  const count = x.length / inputs, out = new Floats(count * outputs);
  for (let row = 0; row < count; row++) {
    for (let o = 0; o < outputs; o++) {
      let sum = bias ? bias[o] : 0;
      for (let i = 0; i < inputs; i++) sum += x[row * inputs + i] * weight[turned ? o * inputs + i : i * outputs + o];
      out[row * outputs + o] = sum;
    }
  }
  return out;
}

const ROOT = Math.sqrt(2 / Math.PI);
function gelu(v) {
  if (on("quick gelu")) return v / (1 + Math.exp(-1.702 * v));
  if (on("relu")) return Math.max(v, 0);
  if (on("coefficients swapped")) return 0.5 * v * (1 + Math.tanh(0.044715 * (v + ROOT * v ** 3)));
  const y = 0.5 * v * (1 + Math.tanh(ROOT * (v + 0.044715 * v ** 3)));
  return on("phi with x") ? v * y : y;
}

// where feature i of head h of token t of row b lies
const place = (b, t, h, i) => (on("heads by view") ? b * T * C + h * T * HS + t * HS + i : (b * T + t) * C + h * HS + i);

function attention(x, layer, w) {
  const bias = on("no qkv bias") ? null : w("attn.c_attn.bias");
  const qkv = linear(x, w("attn.c_attn.weight"), bias, C, 3 * C);
  dump(`${layer} qkv`, qkv, [B, T, 3 * C]);
  const third = (which) => {
    const out = new Floats(B * T * C);
    for (let row = 0; row < B * T; row++) for (let i = 0; i < C; i++) out[row * C + i] = qkv[row * 3 * C + which * C + i];
    return out;
  };
  const q = third(0), k = third(1), v = on("values not projected") ? x : third(2);
  const scores = new Floats(B * NH * T * T), weights = new Floats(B * NH * T * T), mixed = new Floats(B * T * C);
  const at = (b, h, t, s) => ((b * NH + h) * T + t) * T + s;
  const scale = on("unscaled") ? 1 : on("scaled twice") ? 1 / HS : 1 / Math.sqrt(HS);
  const hidden = (t, s) => s > t + (on("one ahead") ? 1 : on("not itself") ? -1 : 0);
  for (let b = 0; b < B; b++) {
    for (let h = 0; h < NH; h++) {
      for (let t = 0; t < T; t++) {
        for (let s = 0; s < T; s++) {
          let sum = 0;
          for (let i = 0; i < HS; i++) sum += q[place(b, t, h, i)] * k[place(b, s, h, i)];
          scores[at(b, h, t, s)] = sum * scale;
        }
      }
      for (let one = 0; one < T; one++) { // one softmax: over the keys of a query
        const cell = (other) => (on("softmax over queries") ? at(b, h, other, one) : at(b, h, one, other));
        const off = (other) => (on("softmax over queries") ? hidden(other, one) : hidden(one, other));
        const value = (other) => (off(other) && !on("no mask") && !on("mask after softmax") ? -1e5 : scores[cell(other)]);
        let most = -Infinity, sum = 0;
        for (let s = 0; s < T; s++) most = Math.max(most, value(s));
        for (let s = 0; s < T; s++) sum += Math.exp(value(s) - most);
        for (let s = 0; s < T; s++) {
          const weight = Math.exp(value(s) - most) / sum;
          weights[cell(s)] = on("mask after softmax") && off(s) ? 0 : weight;
        }
      }
    }
  }
  dump(`${layer} preatt`, scores, [B, NH, T, T]);
  dump(`${layer} att`, weights, [B, NH, T, T]);
  for (let b = 0; b < B; b++) for (let h = 0; h < NH; h++) for (let t = 0; t < T; t++) for (let i = 0; i < HS; i++) {
    let sum = 0;
    for (let s = 0; s < T; s++) sum += weights[at(b, h, t, s)] * v[place(b, s, h, i)];
    let to = place(b, t, h, i);
    if (on("merged without transposing")) to = ((b * NH + h) * T + t) * HS + i;
    if (on("transposed as in R")) to = ((h * B + b) * T + t) * HS + i;
    mixed[to] = sum;
  }
  dump(`${layer} atty`, mixed, [B, T, C]);
  if (on("no output projection")) return mixed;
  return linear(mixed, w("attn.c_proj.weight"), w("attn.c_proj.bias"), C, C, on("projection not turned"));
}

function feedForward(x, layer, w) {
  let up = w("mlp.c_fc.bias"), down = w("mlp.c_proj.bias");
  if (on("up's bias to down")) [up, down] = [null, up]; // the first C of its numbers
  if (on("no feed-forward bias")) up = down = null;
  const fch = linear(x, w("mlp.c_fc.weight"), up, C, 4 * C);
  const act = fch.map(gelu);
  dump(`${layer} fch`, fch, [B, T, 4 * C]);
  dump(`${layer} fch_gelu`, act, [B, T, 4 * C]);
  return linear(act, w("mlp.c_proj.weight"), down, 4 * C, C);
}

const add = (x, y) => x.map((value, i) => value + y[i]);

function dropout(x) { // a small generator of random numbers, always from the same seed
  let state = 12345;
  return x.map((value) => {
    state = (Math.imul(state, 1103515245) + 12345) >>> 0;
    return state / 2 ** 32 < 0.1 ? 0 : value / 0.9;
  });
}

function block(x, layer) {
  const w = (leaf) => tensor(`h.${layer}.${leaf}`);
  const ln1 = layerNorm(x, w("ln_1.weight"), w("ln_1.bias"));
  dump(`${layer} ln1`, ln1, [B, T, C]);
  let attended = attention(ln1, layer, w);
  if (on("dropout stays")) attended = dropout(attended);
  dump(`${layer} attproj`, attended, [B, T, C]);
  const middle = on("no residuals") ? attended : add(x, attended);
  const ln2 = layerNorm(on("side by side") ? x : middle, w("ln_2.weight"), w("ln_2.bias"));
  let fed = feedForward(ln2, layer, w);
  if (on("dropout stays")) fed = dropout(fed);
  dump(`${layer} residual2`, middle, [B, T, C]);
  dump(`${layer} ln2`, ln2, [B, T, C]);
  dump(`${layer} fcproj`, fed, [B, T, C]);
  const result = on("no residuals") ? fed : add(on("second residual after norm") ? ln2 : middle, fed);
  dump(`${layer} residual3`, result, [B, T, C]);
  return result;
}

const wte = tensor("wte.weight"), wpe = tensor("wpe.weight");
let x = new Floats(B * T * C);
for (let b = 0; b < B; b++) for (let t = 0; t < T; t++) {
  let position = t;
  if (on("all at position 0")) position = 0;
  if (on("positions 1 to 0")) position = (t + 1) % T;
  if (on("second row is padded")) position = t + 2 * b;
  for (let i = 0; i < C; i++) {
    const token = wte[ids[b * T + t] * C + i] * (on("embedding times root") ? Math.sqrt(C) : 1);
    x[(b * T + t) * C + i] = token + (on("no positions") ? 0 : wpe[position * C + i]);
  }
}
dump("x encoded", x, [B, T, C]);
for (let layer = 0; layer < (on("last block not run") ? L - 1 : L); layer++) x = block(x, layer);
const lnf = on("no final norm") ? x : layerNorm(x, tensor("ln_f.weight"), tensor("ln_f.bias"));
dump("x lnf", lnf, [B, T, C]);
let logits = linear(lnf, on("head of zeros") ? wte.map(() => 0) : wte, null, C, V, true);
if (on("logits capped")) logits = logits.map((value) => 30 * Math.tanh(value / 30));
if (on("softmax at the end")) {
  for (let row = 0; row < B * T; row++) {
    const one = logits.subarray(row * V, (row + 1) * V);
    const most = one.reduce((a, c) => Math.max(a, c)), e = one.map((value) => Math.exp(value - most));
    const sum = e.reduce((a, c) => a + c, 0);
    for (let i = 0; i < V; i++) one[i] = e[i] / sum;
  }
}
dump("logits", logits, [B, T, V]);
