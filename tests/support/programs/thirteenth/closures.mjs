// GPT-2 in node in functions that return functions: a text is an array of rows, and a block is a function from rows to rows.
// Usage: node closures.mjs model.safetensors ids.txt out-folder ";fault;fault;" heads float32|float64
import { readFileSync, writeFileSync } from "node:fs";

const [, , modelFile, idsFile, outFolder, faults, headCount, dtype] = process.argv;
const Real = dtype === "float64" ? Float64Array : Float32Array;
const has = (fault) => faults.includes(`;${fault};`);

// ---- files ----

const file = readFileSync(modelFile);
const dataStart = 8 + Number(file.readBigUInt64LE(0));
const header = JSON.parse(file.toString("utf8", 8, dataStart));
const texts = readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));

const once = (make) => {
  const made = new Map();
  return (key) => made.get(key) ?? made.set(key, make(key)).get(key);
};
const tensor = once((name) => {
  const [from, to] = header[name].data_offsets;
  return Real.from({ length: (to - from) / 4 }, (_, i) => file.readFloatLE(dataStart + from + 4 * i));
});
const rowsOf = once((name) => {
  const [count, size] = header[name].shape;
  return Array.from({ length: count }, (_, i) => tensor(name).subarray(i * size, (i + 1) * size));
});

const width = header["wte.weight"].shape[1];
const nHead = Number(headCount);
const size = width / nHead;
const numbers = Object.keys(header).filter((name) => name.startsWith("h.")).map((name) => Number(name.split(".")[1]));
const nLayer = Math.max(...numbers) + (has("layers without + 1") ? 0 : 1);

// ---- functions of functions ----

const pipe = (...steps) => (x) => steps.reduce((value, step) => step(value), x);
const compose = (...steps) => (x) => steps.reduceRight((value, step) => step(value), x);
const range = (count) => Array.from({ length: count }, (_, i) => i);

// ---- rows ----

const sum = (row) => row.reduce((total, number) => total + number, 0);
const dot = (a, b) => a.reduce((total, number, i) => total + number * b[i], 0);
const addRow = (a, b) => a.map((number, i) => number + b[i]);
const add = (a, b) => a.map((row, i) => addRow(row, b[i]));
const transpose = (rows) => range(rows[0].length).map((j) => Real.from(rows, (row) => row[j]));

function softmaxRow(row) {
  const most = Math.max(...row);
  const raised = row.map((number) => Math.exp(number - most));
  const total = sum(raised);
  return raised.map((number) => number / total);
}
const softmax = (rows) => rows.map(softmaxRow);

// ---- what is shown: each value of all texts ----

const shown = new Map();
const shapeOf = (value) => (typeof value === "number" ? [] : [value.length, ...shapeOf(value[0])]);
const flat = (value) => (typeof value[0] === "number" ? [...value] : value.flatMap(flat));

function show(name, value) {
  const { data, shape } = shown.get(name) ?? { data: [], shape: [texts.length, ...shapeOf(value)] };
  shown.set(name, { data: data.concat(flat(value)), shape });
  return value;
}
const showing = (name, step) => (x) => show(name, step(x));

// ---- layers ----

const linear = (name, turned = false) => {
  const [nIn, nOut] = header[`${name}.weight`].shape;
  const weight = tensor(`${name}.weight`);
  const bias = has("linear without bias") ? new Real(nOut) : tensor(`${name}.bias`);
  const at = turned || has("linear as torch's") ? (i, o) => o * nIn + i : (i, o) => i * nOut + o;
  return (rows) => rows.map((row) => bias.map((b, o) => row.reduce((total, number, i) => total + number * weight[at(i, o)], b)));
};

const layerNorm = (name) => {
  const gain = tensor(`${name}.weight`);
  const shift = has("norm without shift") ? new Real(width) : tensor(`${name}.bias`);
  return (rows) =>
    rows.map((row) => {
      const mean = sum(row) / width;
      const variance = row.reduce((total, x) => total + (x - mean) ** 2, 0) / (has("variance by n - 1") ? width - 1 : width);
      const own = has("norm writes into its rows") ? row : new Real(width);
      own.set(row.map((x, i) => ((x - mean) / Math.sqrt(variance + 1e-5)) * gain[i] + shift[i]));
      return own;
    });
};

function gelu(x) {
  const factor = has("Math.sqrt(2) / Math.PI") ? Math.sqrt(2) / Math.PI : Math.sqrt(2 / Math.PI);
  const cube = has("x ^ 3") ? x ^ 3 : x ** 3;
  return 0.5 * x * (1 + Math.tanh(factor * (x + 0.044715 * cube)));
}

// ---- attention ----

let scale = 1 / Math.sqrt(size);
if (has("no scale")) scale = 1;
if (has("root of width")) scale = 1 / Math.sqrt(width);
if (has("times the root")) scale = Math.sqrt(size);

let isHidden = (i, j) => j > i;
if (has("no mask")) isHidden = () => false;
if (has("j >= i")) isHidden = (i, j) => j >= i;
if (has("j > i + 1")) isHidden = (i, j) => j > i + 1;
const hidden = has("Number.MIN_VALUE") ? Number.MIN_VALUE : -1e10;

// Rows of q, k and v together become three lists of heads, each of them rows.
function split(rows) {
  const place = has("q, k, v inside each head") ? (third, h) => (3 * h + third) * size : (third, h) => third * width + h * size;
  const heads = (third) => range(nHead).map((h) => rows.map((row) => row.slice(place(third, h), place(third, h) + size)));
  return [0, 1, 2].map(heads);
}

// Heads, each of them rows, become rows again.
function join(heads) {
  const one = (i) => heads.flatMap((rows) => [...rows[i]]);
  const unitByUnit = (i) => range(width).map((unit) => heads[unit % nHead][i][Math.floor(unit / nHead)]);
  return heads[0].map((_, i) => Real.from(has("heads joined unit by unit") ? unitByUnit(i) : one(i)));
}

const weigh = (scores) => (has("softmax down the columns") ? transpose(softmax(transpose(scores))) : softmax(scores));

const memo = new Map(); // a layer's keys and values, of one text
const remembered = (key, value) => memo.get(key) ?? memo.set(key, value).get(key);

const attention = (name, n) => {
  const qkv = showing(`${n} qkv`, linear(`${name}.c_attn`));
  const project = has("no c_proj") ? (rows) => rows : linear(`${name}.c_proj`, has("c_proj turned"));
  return (rows) => {
    let [q, k, v] = split(qkv(rows));
    if (has("[k, q, v]")) [k, q, v] = [q, k, v];
    [k, v] = remembered(n, [k, v]);
    Object.entries({ q, k, v }).forEach(([part, heads]) => show(`${n} ${part}`, heads));
    const score = (h, i) => (key, j) => (isHidden(i, j) ? hidden : dot(q[h][i], key) * scale);
    const scores = show(`${n} scores`, range(nHead).map((h) => rows.map((_, i) => Real.from(k[h], score(h, i)))));
    const weights = show(`${n} weights`, scores.map(weigh));
    const mix = (h) => weights[h].map((row) => Real.from(transpose(v[h]), (column) => dot(row, column)));
    return project(show(`${n} joined`, join(range(nHead).map(mix))));
  };
};

// ---- blocks ----

const residual = (norm, branch) => (has("norm round the sum") ? (x) => norm(add(x, branch(x))) : (x) => add(x, branch(norm(x))));

const block = (layer, n) => {
  const norm1 = showing(`${n} norm1`, layerNorm(`${layer}.ln_1`));
  const norm2 = showing(`${n} norm2`, layerNorm(`${layer}.ln_2`));
  const attend = showing(`${n} attended`, attention(`${layer}.attn`, n));
  const mlp = pipe(
    showing(`${n} up`, linear(`${layer}.mlp.c_fc`)),
    showing(`${n} act`, (rows) => rows.map((row) => row.map(gelu))),
    showing(`${n} down`, linear(`${layer}.mlp.c_proj`)),
  );
  const first = has("attention without ln_1") ? (x) => add(x, attend(x)) : residual(norm1, attend);
  const second = has("mlp without residual") ? pipe(norm2, mlp) : residual(norm2, mlp);
  return pipe(showing(`${n} middle`, first), showing(`${n} out`, second));
};

const blocks = [];
for (let n = 0; n < nLayer; n++) {
  var last = `h.${n}`;
  const own = `h.${n}`;
  blocks.push((x) => block(has("var in the loop") ? last : own, n)(x)); // made when it is first called
}

// ---- the model ----

const counter = () => {
  let next = 0;
  return { take: () => next++, reset: () => (next = 0) };
};
const position = counter();

const sine = (at) => Real.from(range(width), (i) => {
  const angle = at / 10000 ** ((i - (i % 2)) / width);
  return i % 2 ? Math.cos(angle) : Math.sin(angle);
});
let placeOf = (at) => rowsOf("wpe.weight")[at];
if (has("sines")) placeOf = sine;
if (has("no positions")) placeOf = () => new Real(width);

const embed = (ids) => ids.map((id) => addRow(rowsOf("wte.weight")[id], placeOf(position.take())));
const logits = (rows) => rows.map((row) => Real.from(rowsOf("wte.weight"), (token) => dot(row, token)));

const model = pipe(
  showing("x embedded", embed),
  has("compose for pipe") ? compose(...blocks) : pipe(...blocks),
  showing("x normed", has("no final norm") ? (rows) => rows : layerNorm("ln_f")),
  showing("logits", has("softmax at the end") ? pipe(logits, softmax) : logits),
);

function writeNpy(name, { shape, data }) {
  const descr = dtype === "float64" ? "<f8" : "<f4";
  const text = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  const head = Buffer.from(`\x93NUMPY\x01\x00\x76\x00${text.padEnd(117)}\n`, "latin1");
  writeFileSync(`${outFolder}/${name}.npy`, Buffer.concat([head, Buffer.from(Real.from(data).buffer)]));
}

for (const ids of texts) {
  if (!has("keys and values memoised")) memo.clear();
  if (!has("counter not reset")) position.reset();
  model(ids);
}
for (const [name, value] of shown) writeNpy(name, value);
