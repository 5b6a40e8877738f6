// GPT-2 in node: a session reads half of a text in one call, then each token in a call of its own, and keeps keys and values.
// Usage: node session.mjs model.safetensors ids.txt out-folder heads float32|float64
// ids.txt: one text a line, all of one length. Each value of all texts and all calls becomes one .npy.
import { readFileSync, writeFileSync } from "node:fs";

const [, , modelFile, idsFile, outFolder, headCount, dtype] = process.argv;
const Real = dtype === "float64" ? Float64Array : Float32Array;

// ---- files ----

const file = readFileSync(modelFile);
const dataStart = 8 + Number(file.readBigUInt64LE(0));
const header = JSON.parse(file.toString("utf8", 8, dataStart));
const weights = {};
for (const [name, entry] of Object.entries(header)) {
  if (name === "__metadata__") continue;
  const [from, to] = entry.data_offsets;
  weights[name] = Real.from({ length: (to - from) / 4 }, (_, i) => file.readFloatLE(dataStart + from + 4 * i));
}
const texts = readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));
const length = texts[0].length;

const [vocabulary, width] = header["wte.weight"].shape;
const nHead = Number(headCount);
const size = width / nHead;
let nLayer = 0;
while (`h.${nLayer}.ln_1.weight` in weights) nLayer++;

// ---- what is shown: (texts, tokens, ...), or (texts, heads, tokens, keys) ----

const shown = new Map();
let text = 0;

function array(name, shape) {
  if (!shown.has(name)) shown.set(name, { shape, data: new Real(shape.reduce((a, b) => a * b)) });
  return shown.get(name).data;
}

// Rows side by side in one array; the first is token `at` of the text.
function show(name, at, rows, wide = width) {
  array(name, [texts.length, length, wide]).set(rows, (text * length + at) * wide);
}

function showHead(name, at, h, row) {
  array(name, [texts.length, nHead, length, length]).set(row.slice(0, length), ((text * nHead + h) * length + at) * length);
}

function writeNpy(name, { shape, data }) {
  const descr = dtype === "float64" ? "<f8" : "<f4";
  const words = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  const head = Buffer.from(`\x93NUMPY\x01\x00\x76\x00${words.padEnd(117)}\n`, "latin1");
  writeFileSync(`${outFolder}/${name}.npy`, Buffer.concat([head, Buffer.from(data.buffer)]));
}

// ---- layers: n rows of numbers, side by side ----

function linear(name, x, n, out = new Real(n * header[`${name}.weight`].shape[1])) {
  const [nIn, nOut] = header[`${name}.weight`].shape;
  const matrix = weights[`${name}.weight`];
  const bias = weights[`${name}.bias`];
  for (let i = 0; i < n; i++) {
    for (let o = 0; o < nOut; o++) {
      let sum = bias[o];
      for (let u = 0; u < nIn; u++) sum += x[i * nIn + u] * matrix[u * nOut + o];
      out[i * nOut + o] = sum;
    }
  }
  return out;
}

function layerNorm(name, x, n) {
  const out = new Real(n * width);
  for (let i = 0; i < n; i++) {
    const row = x.subarray(i * width, (i + 1) * width);
    const mean = row.reduce((a, b) => a + b, 0) / width;
    const variance = row.reduce((a, b) => a + (b - mean) ** 2, 0) / width;
    for (let u = 0; u < width; u++) {
      const normed = (row[u] - mean) / Math.sqrt(variance + 1e-5);
      out[i * width + u] = normed * weights[`${name}.weight`][u] + weights[`${name}.bias`][u];
    }
  }
  return out;
}

const gelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const add = (a, b) => a.map((number, i) => number + b[i]);
const head = (row, h) => row.subarray(h * size, (h + 1) * size);
const dot = (a, b) => a.reduce((sum, number, u) => sum + number * b[u], 0);

function softmax(row) {
  const most = Math.max(...row);
  const raised = row.map((number) => Math.exp(number - most));
  const total = raised.reduce((a, b) => a + b, 0);
  return raised.map((number) => number / total);
}

// ---- a session ----

const scale = 1 / Math.sqrt(size); // the cache holds scaled keys
const scratch = new Real(length * 3 * width); // queries, keys and values of one layer and one call

class Session {
  past = Array.from({ length: nLayer }, () => ({ k: [], v: [] }));
  tokens = 0; // that the session has read

  attention(n, at, x, count) {
    const past = this.past[n];
    const qkv = linear(`h.${n}.attn.c_attn`, x, count, scratch);
    const third = (i, which) => qkv.slice((3 * i + which) * width, (3 * i + which + 1) * width);
    ["queries", "keys", "values"].forEach((name, which) => {
      for (let i = 0; i < count; i++) show(`${n} ${name}`, at + i, third(i, which));
    });
    for (let i = 0; i < count; i++) {
      past.k.push(third(i, 1).map((number) => number * scale));
      past.v.push(third(i, 2));
    }
    const mixed = new Real(count * width);
    for (let h = 0; h < nHead; h++) {
      const keys = past.k.map((row) => head(row, h));
      const values = past.v.map((row) => head(row, h));
      for (let i = 0; i < count; i++) {
        const query = head(third(i, 0), h);
        const hidden = (j) => j > this.tokens + i;
        const scores = Real.from(keys, (key, j) => (hidden(j) ? -Infinity : dot(query, key)));
        const pattern = softmax(scores);
        showHead(`${n} scores`, at + i, h, scores);
        showHead(`${n} pattern`, at + i, h, pattern);
        values.forEach((value, j) => {
          for (let u = 0; u < size; u++) mixed[i * width + h * size + u] += pattern[j] * value[u];
        });
      }
    }
    show(`${n} heads`, at, mixed);
    return linear(`h.${n}.attn.c_proj`, mixed, count);
  }

  block(n, at, x, count) {
    const first = layerNorm(`h.${n}.ln_1`, x, count);
    show(`${n} first`, at, first);
    const attention = this.attention(n, at, first, count);
    show(`${n} attention`, at, attention);
    const between = add(x, attention);
    show(`${n} between`, at, between);
    const second = layerNorm(`h.${n}.ln_2`, between, count);
    show(`${n} second`, at, second);
    let wide = linear(`h.${n}.mlp.c_fc`, second, count);
    show(`${n} wide`, at, wide, 4 * width);
    wide = wide.map(gelu);
    show(`${n} bent`, at, wide, 4 * width);
    const narrow = linear(`h.${n}.mlp.c_proj`, wide, count);
    show(`${n} narrow`, at, narrow);
    const end = add(between, narrow);
    show(`${n} end`, at, end);
    return end;
  }

  // Read `ids`, of which the first is token `at` of the text.
  feed(ids, at) {
    let x = new Real(ids.length * width);
    ids.forEach((id, i) => {
      const place = this.tokens + i;
      for (let u = 0; u < width; u++) {
        x[i * width + u] = weights["wte.weight"][id * width + u] + weights["wpe.weight"][place * width + u];
      }
    });
    show("x start", at, x);
    for (let n = 0; n < nLayer; n++) x = this.block(n, at, x, ids.length);
    this.tokens += ids.length;
    const normed = layerNorm("ln_f", x, ids.length);
    show("x normed", at, normed);
    const logits = new Real(ids.length * vocabulary);
    for (let i = 0; i < ids.length; i++) {
      const row = normed.subarray(i * width, (i + 1) * width);
      for (let t = 0; t < vocabulary; t++) logits[i * vocabulary + t] = dot(row, weights["wte.weight"].subarray(t * width));
    }
    show("logits", at, logits, vocabulary);
  }
}

for (; text < texts.length; text++) {
  const ids = texts[text];
  const session = new Session();
  const half = Math.ceil(length / 2);
  session.feed(ids.slice(0, half), 0);
  for (let t = half; t < length; t++) session.feed([ids[t]], t);
}
for (const [name, value] of shown) writeNpy(name, value);
