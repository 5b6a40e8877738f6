// GPT-2 in node that generates: a row's prompt first, then one token at a time; an array for each token, lists of past keys.
// Usage: node stream.mjs model.safetensors ids.txt out-folder ";fault;fault;" heads float32|float64
import { readFileSync, writeFileSync } from "node:fs";

const [, , modelFile, idsFile, outFolder, faults, headCount, dtype] = process.argv;
const Real = dtype === "float64" ? Float64Array : Float32Array;
const has = (fault) => faults.includes(`;${fault};`);
const stepCount = 4; // so many tokens of a row come after its prompt

// ---- weights ----

function openSafetensors(path) {
  const file = readFileSync(path);
  const start = 8 + Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.toString("utf8", 8, start));
  const tensor = (name) => {
    const { shape, data_offsets: [from, to] } = header[name];
    const data = new Real((to - from) / 4);
    for (let i = 0; i < data.length; i++) data[i] = file.readFloatLE(start + from + 4 * i);
    return { shape, data };
  };
  const nLayer = Object.keys(header).filter((name) => /^h\.\d+\.ln_1\.weight$/.test(name)).length;
  return { tensor, nLayer };
}

const { tensor, nLayer } = openSafetensors(modelFile);

function readLinear(name) {
  const { shape, data } = tensor(`${name}.weight`);
  return { nIn: shape[0], nOut: shape[1], w: data, b: tensor(`${name}.bias`).data };
}

function readNorm(name) {
  const gain = tensor(`${name}.weight`).data;
  if (has("gamma and beta not found")) return { gain: new Real(gain.length).fill(1), shift: new Real(gain.length) };
  return { gain, shift: tensor(`${name}.bias`).data };
}

const { shape: [nVocab, nEmbd], data: wte } = tensor("wte.weight");
const wpe = tensor("wpe.weight").data;
const lnF = readNorm("ln_f");
const layers = [];
for (let n = 0; n < nLayer; n++) {
  layers.push({
    ln1: readNorm(`h.${n}.ln_1`),
    cAttn: readLinear(`h.${n}.attn.c_attn`),
    cProj: readLinear(`h.${n}.attn.c_proj`),
    ln2: readNorm(`h.${n}.ln_2`),
    cFc: readLinear(`h.${n}.mlp.c_fc`),
    down: readLinear(`h.${n}.mlp.c_proj`),
    scratch: new Real(3 * nEmbd),
  });
}
const nHead = Number(headCount);
const headSize = nEmbd / nHead;

// ---- kernels, each for one token ----

function layerNorm(x, { gain, shift }) {
  const n = x.length;
  const mean = x.reduce((sum, value) => sum + value, 0) / n;
  const squares = x.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  const deviation = Math.sqrt(squares / (has("n - 1") ? n - 1 : n) + (has("eps 1e-3") ? 1e-3 : 1e-5));
  const out = has("norm in place") ? x : new Real(n);
  for (let i = 0; i < n; i++) out[i] = ((x[i] - mean) / deviation) * gain[i] + shift[i];
  return out;
}

function linear(x, { nIn, nOut, w, b }, { biased = true, turned = false, out = new Real(nOut) } = {}) {
  const byRows = turned || has("weights as (out, in)");
  for (let o = 0; o < nOut; o++) {
    let sum = biased ? b[o] : 0;
    for (let i = 0; i < nIn; i++) sum += x[i] * w[byRows ? o * nIn + i : i * nOut + o];
    out[o] = sum;
  }
  return out;
}

function gelu(x) {
  if (has("quick gelu")) return x / (1 + Math.exp(-1.702 * x));
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
}

function softmax(scores) {
  const most = scores.reduce((one, other) => Math.max(one, other), -Infinity);
  const raised = scores.map((score) => Math.exp(score - most));
  const sum = raised.reduce((one, other) => one + other, 0);
  return raised.map((value) => value / sum);
}

const plus = (one, other) => one.map((value, i) => value + other[i]);

// ---- the model ----

const newPast = () => {
  const empty = () => ({ keys: [], values: [] });
  return has("fill shares one past") ? new Array(nLayer).fill(empty()) : Array.from({ length: nLayer }, empty);
};

function embed(token, position) {
  const x = wte.subarray(token * nEmbd, (token + 1) * nEmbd);
  const place = wpe.subarray(position * nEmbd, (position + 1) * nEmbd);
  if (!has("position added into wte")) return plus(x, place);
  for (let i = 0; i < nEmbd; i++) x[i] += place[i];
  return x.slice();
}

function cut(qkv) {
  const at = (third) => qkv.subarray(third * nEmbd, (third + 1) * nEmbd);
  return has("v before k") ? [at(0), at(2), at(1)] : [at(0), at(1), at(2)];
}

// Where number i of head h is in a token's array.
const unit = (h, i) => (has("heads interleaved") ? i * nHead + h : h * headSize + i);

function attention(normed, layer, past, show) {
  const steps = past.keys.length > 0;
  const began = past.keys.length; // tokens that came before this chunk
  const bias = { biased: !has("c_attn without bias") };
  if (steps && has("scratch pushed into the past")) bias.out = layer.scratch;
  const qkv = normed.map((x) => linear(x, layer.cAttn, bias));
  const cuts = qkv.map(cut);
  const queries = cuts.map(([q]) => q);
  const keys = [...past.keys, ...cuts.map(([, k]) => k)];
  const values = [...past.values, ...cuts.map(([, , v]) => v)];
  show("qkv", qkv), show("q", queries), show("k", cuts.map(([, k]) => k)), show("v", cuts.map(([, , v]) => v));
  const seen = steps && has("step without its own key") ? began : keys.length;
  const first = has("mask from the chunk's index") ? 0 : began;
  let factor = 1 / Math.sqrt(has("root of nEmbd") ? nEmbd : headSize);
  if (has("no scale")) factor = 1;
  const masked = has("masked with Number.MIN_VALUE") ? Number.MIN_VALUE : -Infinity;
  const allScores = [];
  const allWeights = [];
  const mixed = queries.map((q, t) => {
    const out = new Real(nEmbd);
    const rows = { scores: [], weights: [] };
    for (let h = 0; h < nHead; h++) {
      const scores = new Real(seen);
      for (let j = 0; j < seen; j++) {
        for (let i = 0; i < headSize; i++) scores[j] += q[unit(h, i)] * keys[j][unit(h, i)];
        scores[j] *= factor;
      }
      rows.scores.push(scores);
      const hidden = (j) => j > first + t && !has("prompt without mask");
      const weights = softmax(scores.map((score, j) => (hidden(j) ? masked : score)));
      rows.weights.push(weights);
      for (let j = 0; j < seen; j++) for (let i = 0; i < headSize; i++) out[unit(h, i)] += weights[j] * values[j][unit(h, i)];
    }
    allScores.push(rows.scores);
    allWeights.push(rows.weights);
    return out;
  });
  past.keys.push(...cuts.map(([, k]) => k));
  past.values.push(...cuts.map(([, , v]) => v));
  show.pairs("scores", allScores), show.pairs("weights", allWeights), show("context", mixed);
  return mixed.map((x) => linear(x, layer.cProj, { turned: has("c_proj as (out, in)") }));
}

function runLayer(xs, layer, past, show) {
  const normed = show("ln_1", xs.map((x) => layerNorm(x, layer.ln1)));
  const attended = show("attended", attention(normed, layer, past, show));
  const middle = show("middle", has("attention replaces x") ? attended : xs.map((x, t) => plus(x, attended[t])));
  const second = has("mlp without ln_2") ? middle : show("ln_2", middle.map((x) => layerNorm(x, layer.ln2)));
  const hidden = show("hidden", second.map((x) => linear(x, layer.cFc)));
  const active = show("active", hidden.map((x) => x.map(gelu)));
  const fed = show("fed", active.map((x) => linear(x, layer.down)));
  return show("out", middle.map((x, t) => plus(x, fed[t])));
}

function forward(tokens, position, past, showAs) {
  let xs = tokens.map((token, t) => embed(token, position + t));
  showAs("x")("positions", tokens.map((_, t) => [position + t]));
  showAs("x")("embedded", xs);
  const count = has("last layer not run") ? nLayer - 1 : nLayer;
  for (let n = 0; n < count; n++) xs = runLayer(xs, layers[n], past[n], showAs(n));
  const final = has("no ln_f") ? xs : xs.map((x) => layerNorm(x, lnF));
  showAs("x")("final", final);
  const head = { nIn: nEmbd, nOut: nVocab, w: wte };
  const logits = final.map((x) => {
    const own = new Real(nVocab);
    for (let v = 0; v < nVocab; v++) for (let i = 0; i < head.nIn; i++) own[v] += x[i] * head.w[v * nEmbd + i];
    return has("temperature") ? own.map((logit) => logit / 0.7) : own;
  });
  showAs("")("logits", logits);
}

// ---- rows, and what is shown of them ----

const rows = readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));
const length = rows[0].length;
const shown = new Map();

function keep(name, shape) {
  if (!shown.has(name)) shown.set(name, { shape, data: new Real(shape.reduce((one, other) => one * other)) });
  return shown.get(name).data;
}

// What shows a chunk of row b that begins at token `start`; nothing where the chunk is no part of the row.
const shower = (b, start) => (where) => {
  const named = (part) => `${where} ${part}`.trim();
  const show = (part, vectors) => {
    if (start === null) return vectors;
    const size = vectors[0].length;
    const data = keep(named(part), [rows.length, length, size]);
    vectors.forEach((vector, t) => data.set(vector, (b * length + start + t) * size));
    return vectors;
  };
  show.pairs = (part, tokens) => {
    if (start === null) return;
    const data = keep(named(part), [rows.length, nHead, length, length]);
    tokens.forEach((heads, t) =>
      heads.forEach((row, h) => data.set(row.subarray(0, length), ((b * nHead + h) * length + start + t) * length)),
    );
  };
  return show;
};

function writeNpy(name, { shape, data }) {
  const descr = dtype === "float64" ? "<f8" : "<f4";
  const header = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  const head = Buffer.from(`\x93NUMPY\x01\x00\x76\x00${header.padEnd(117)}\n`, "latin1");
  writeFileSync(`${outFolder}/${name}.npy`, Buffer.concat([head, Buffer.from(data.buffer, data.byteOffset, data.byteLength)]));
}

let past = newPast();
rows.forEach((row, b) => {
  if (!has("past kept for the next row")) past = newPast();
  const prompt = length - stepCount;
  let position = has("past kept for the next row") ? past[0].keys.length : 0;
  forward(row.slice(0, prompt), position, past, shower(b, 0));
  position += prompt;
  if (has("prompt's last token fed again")) forward([row[prompt - 1]], position++, past, shower(b, null));
  for (let t = prompt; t < length; t++, position++) {
    let own = position;
    if (has("steps count from 0")) own = t - prompt;
    if (has("steps are one too far")) own = position + 1;
    forward([row[t]], own, past, shower(b, t));
  }
});
for (const [name, array] of shown) writeNpy(name, array);
