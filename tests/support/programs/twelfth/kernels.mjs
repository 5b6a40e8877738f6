// GPT-2 in node as it is written for WebGPU: one flat memory, kernels for one invocation each, and uniforms that say what is where.
// Usage: node kernels.mjs model.safetensors ids.txt out-folder ";fault;fault;" heads float32|float64
import { readFileSync, writeFileSync } from "node:fs";

const [, , modelFile, idsFile, outFolder, faults, headCount, dtype] = process.argv;
const Real = dtype === "float64" ? Float64Array : Float32Array;
const has = (fault) => faults.includes(`;${fault};`);
const tile = 16;
const upToTile = (count) => Math.ceil(count / tile) * tile;

// ---- files ----

const file = readFileSync(modelFile);
const dataStart = 8 + Number(file.readBigUInt64LE(0));
const header = JSON.parse(file.toString("utf8", 8, dataStart));
const rows = readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));

const [nVocab, nEmbd] = header["wte.weight"].shape;
const nLayer = Object.keys(header).filter((name) => name.endsWith(".ln_1.weight")).length;
const nHead = Number(headCount);
const headSize = nEmbd / nHead;
const nTexts = rows.length;
const nTokens = rows[0].length;
const M = nTexts * nTokens; // the texts one after the other: a matrix of M tokens
const nVocabTiled = upToTile(nVocab);

// ---- memory: places are indices of `mem` ----

const sizes = Object.entries(header).filter(([name]) => name !== "__metadata__").map(([, { shape }]) => shape.reduce((a, b) => a * b));
const attentionSize = nHead * M * M; // enough for the texts as one
const mem = new Real(sizes.reduce((a, b) => a + b) + M * (24 * nEmbd + 2 * nVocabTiled) + 2 * attentionSize + tile * nEmbd);
let used = 0;

function allocate(count) {
  const place = used;
  used += count;
  if (used > mem.length) throw new Error("memory is full");
  return place;
}

function upload(name, padded = 0) {
  const [from, to] = header[name].data_offsets;
  const place = allocate(Math.max((to - from) / 4, padded));
  for (let i = 0; i < (to - from) / 4; i++) mem[place + i] = file.readFloatLE(dataStart + from + 4 * i);
  return place;
}

const uploadBoth = (name) => ({ weight: upload(`${name}.weight`), bias: upload(`${name}.bias`) });

const wte = upload("wte.weight", nVocabTiled * nEmbd);
const wpe = upload("wpe.weight");
const lnF = uploadBoth("ln_f");
const layerPlaces = Array.from({ length: nLayer }, (_, n) => ({
  ln1: uploadBoth(`h.${n}.ln_1`),
  cAttn: uploadBoth(`h.${n}.attn.c_attn`),
  cProj: uploadBoth(`h.${n}.attn.c_proj`),
  ln2: uploadBoth(`h.${n}.ln_2`),
  cFc: uploadBoth(`h.${n}.mlp.c_fc`),
  mlpProj: uploadBoth(`h.${n}.mlp.c_proj`),
}));

const buffers = {
  ids: allocate(M),
  x: [allocate(M * nEmbd), allocate(M * nEmbd)], // a block reads one and writes the other
  normed: allocate(M * nEmbd),
  qkv: allocate(M * 3 * nEmbd),
  scores: allocate(attentionSize),
  probs: allocate(attentionSize),
  mix: allocate(M * nEmbd),
  attnOut: allocate(M * nEmbd),
  mid: allocate(M * nEmbd),
  hidden: allocate(M * 4 * nEmbd),
  mlpOut: allocate(M * nEmbd),
  final: allocate(M * nEmbd),
  logits: allocate(M * nVocabTiled),
};
mem.set(rows.flat(), buffers.ids);

// ---- kernels: (x, y, z) is the invocation, u are its uniforms ----

function embed(col, row, _, u) {
  const token = mem[u.ids + row];
  const position = has("position is the row") ? row : row % u.tokens;
  const place = has("no positions") ? 0 : mem[u.wpe + position * u.width + col];
  mem[u.out + row * u.width + col] = mem[u.wte + token * u.width + col] + place;
}

// One line of numbers that are `stride` apart.
function normalise(x, text, _, u) {
  const start = text * u.textSize + x * u.step;
  let mean = 0;
  for (let i = 0; i < u.count; i++) mean += mem[u.in + start + i * u.stride];
  mean /= u.count;
  let variance = 0;
  for (let i = 0; i < u.count; i++) variance += (mem[u.in + start + i * u.stride] - mean) ** 2;
  const inverse = 1 / Math.sqrt(variance / u.count + 1e-5);
  for (let i = 0; i < u.count; i++) {
    const at = start + i * u.stride;
    mem[u.out + at] = (mem[u.in + at] - mean) * inverse;
  }
}

function affine(col, row, _, u) {
  const at = u.out + row * u.width + col;
  mem[at] = mem[at] * mem[u.gain + col] + mem[u.shift + col];
}

function matmul(col, row, _, u) {
  let sum = u.bias === undefined ? 0 : mem[u.bias + col];
  for (let k = 0; k < u.nIn; k++) sum += mem[u.in + row * u.nIn + k] * mem[u.weight + (u.turned ? col * u.nIn + k : k * u.nOut + col)];
  mem[u.out + row * u.nOut + col] = sum;
}

// Where number i of head h is in a token's numbers, when heads are `step` apart.
const unit = (h, i, step) => (has("unit times nHead") ? i * nHead + h : h * step + i);

function score(key, query, z, u) {
  const text = Math.floor(z / nHead);
  const h = z % nHead;
  const queryRow = u.qkv + (text * u.tokens + query) * 3 * nEmbd + u.q;
  const keyRow = u.qkv + (text * u.tokens + key) * 3 * nEmbd + u.k;
  let dot = 0;
  for (let i = 0; i < headSize; i++) dot += mem[queryRow + unit(h, i, u.headStep)] * mem[keyRow + unit(h, i, u.headStep)];
  let hidden = key > query;
  if (has("no mask")) hidden = false;
  if (has("col >= row")) hidden = key >= query;
  mem[u.out + (z * u.tokens + query) * u.tokens + key] = hidden ? (has("masked with 0") ? 0 : -1e9) : dot * u.scale;
}

function softmax(line, z, _, u) {
  const byColumns = has("softmax by columns");
  const start = z * u.tokens * u.tokens + (byColumns ? line : line * u.tokens);
  const stride = byColumns ? u.tokens : 1;
  let most = -Infinity;
  for (let i = 0; i < u.tokens; i++) most = Math.max(most, mem[u.in + start + i * stride]);
  let sum = 0;
  for (let i = 0; i < u.tokens; i++) {
    const raised = Math.exp((mem[u.in + start + i * stride] - most) * u.scale);
    mem[u.out + start + i * stride] = raised;
    sum += raised;
  }
  for (let i = 0; i < u.tokens; i++) mem[u.out + start + i * stride] /= sum;
}

function mixValues(i, query, z, u) {
  const text = Math.floor(z / nHead);
  const h = z % nHead;
  let sum = 0;
  for (let key = 0; key < u.tokens; key++) {
    const value = u.qkv + (text * u.tokens + key) * 3 * nEmbd + u.v + unit(h, i, u.headStep);
    sum += mem[u.probs + (z * u.tokens + query) * u.tokens + key] * mem[value];
  }
  let at = (text * u.tokens + query) * nEmbd + unit(h, i, headSize);
  if (has("mix as (heads, tokens, size)")) at = (z * u.tokens + query) * headSize + i;
  mem[u.out + at] = sum;
}

function gelu(col, row, _, u) {
  const at = u.out + row * u.width + col;
  const x = mem[at];
  if (has("sigmoid gelu")) mem[at] = x / (1 + Math.exp(-1.702 * x));
  else mem[at] = 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x * x * x)));
}

function add(col, row, _, u) {
  const at = row * u.width + col;
  mem[u.out + at] = mem[u.one + at] + mem[u.other + at];
}

function dispatch(kernel, [width, height, depth = 1], uniforms) {
  for (let z = 0; z < depth; z++) for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) kernel(x, y, z, uniforms);
}

// ---- what is read back ----

const shown = new Map();

// Keep `shape` numbers from `place` on; the last axis may be shorter there than it is in memory.
function show(name, place, shape, stride = shape.at(-1)) {
  const last = shape.at(-1);
  const data = new Real(shape.reduce((a, b) => a * b));
  for (let line = 0; line * last < data.length; line++) {
    const start = place + line * stride;
    data.set(mem.subarray(start, start + last), line * last);
  }
  shown.set(name, { shape, data });
}

const showTokens = (name, place, size = nEmbd) => show(name, place, [nTexts, nTokens, size]);

// ---- the passes ----

function layerNorm(from, out, { weight, bias }) {
  const down = has("norm down the columns");
  const textSize = nTokens * nEmbd;
  const byRows = { in: from, out, textSize, step: nEmbd, stride: 1, count: nEmbd };
  const byColumns = { in: from, out, textSize, step: 1, stride: nEmbd, count: nTokens };
  dispatch(normalise, [down ? nEmbd : nTokens, nTexts], down ? byColumns : byRows);
  const [gain, shift] = has("gain and shift exchanged") ? [bias, weight] : [weight, bias];
  if (!has("gain and shift not dispatched")) dispatch(affine, [nEmbd, M], { out, width: nEmbd, gain, shift });
}

function linear(from, out, { weight, bias }, nIn, nOut, turned = false) {
  dispatch(matmul, [nOut, M], { in: from, out, weight, bias, nIn, nOut, turned: turned || has("matrices as (out, in)") });
}

function attention(n) {
  const { qkv, scores, probs, mix } = buffers;
  const [texts, tokens] = has("rows as one text") ? [1, M] : [nTexts, nTokens];
  let places = { q: 0, k: nEmbd, v: 2 * nEmbd, headStep: headSize };
  if (has("k's place left at 0")) places = { ...places, k: 0 };
  if (has("heads in steps of 3 sizes")) places = { q: 0, k: headSize, v: 2 * headSize, headStep: 3 * headSize };
  let scale = 1 / Math.sqrt(headSize);
  if (has("root of nEmbd")) scale = 1 / Math.sqrt(nEmbd);
  if (has("root of nHead")) scale = 1 / Math.sqrt(nHead);
  if (has("no scale")) scale = 1;
  const again = has("scaled in both kernels") ? 1 / Math.sqrt(headSize) : 1;
  dispatch(score, [tokens, tokens, texts * nHead], { ...places, qkv, tokens, scale, out: scores });
  show(`${n} scores`, scores, [texts, nHead, tokens, tokens]);
  dispatch(softmax, [tokens, texts * nHead], { in: scores, out: probs, tokens, scale: again });
  show(`${n} probs`, probs, [texts, nHead, tokens, tokens]);
  dispatch(mixValues, [headSize, tokens, texts * nHead], { ...places, qkv, probs, tokens, out: mix });
  showTokens(`${n} mix`, mix);
}

function block(n) {
  const { normed, qkv, mix, attnOut, mid, hidden, mlpOut } = buffers;
  const from = buffers.x[n % 2];
  const out = buffers.x[(n + 1) % 2];
  const at = layerPlaces[has("one uniform for all layers") ? nLayer - 1 : n];
  const stream = (place) => (has("sum reads the normed") ? normed : place);
  layerNorm(from, normed, at.ln1);
  showTokens(`${n} norm1`, normed);
  linear(normed, qkv, at.cAttn, nEmbd, 3 * nEmbd);
  showTokens(`${n} qkv`, qkv, 3 * nEmbd);
  attention(n);
  linear(mix, attnOut, at.cProj, nEmbd, nEmbd, has("c_proj as (out, in)"));
  showTokens(`${n} attnOut`, attnOut);
  dispatch(add, [nEmbd, M], { one: stream(from), other: attnOut, out: mid, width: nEmbd });
  if (has("attention summed twice")) dispatch(add, [nEmbd, M], { one: mid, other: attnOut, out: mid, width: nEmbd });
  showTokens(`${n} mid`, mid);
  layerNorm(has("ln_2 reads the block's input") ? from : mid, normed, at.ln2);
  showTokens(`${n} norm2`, normed);
  const cFc = has("c_fc's bias not bound") ? { weight: at.cFc.weight } : at.cFc;
  linear(has("c_fc reads the stream") ? mid : normed, hidden, cFc, nEmbd, 4 * nEmbd);
  showTokens(`${n} hidden`, hidden, 4 * nEmbd);
  if (!has("gelu not dispatched")) dispatch(gelu, [4 * nEmbd, M], { out: hidden, width: 4 * nEmbd });
  showTokens(`${n} gelu`, hidden, 4 * nEmbd);
  linear(hidden, mlpOut, at.mlpProj, 4 * nEmbd, nEmbd);
  showTokens(`${n} mlpOut`, mlpOut);
  if (has("mlp without its sum")) mem.copyWithin(out, mlpOut, mlpOut + M * nEmbd);
  else dispatch(add, [nEmbd, M], { one: stream(mid), other: mlpOut, out, width: nEmbd });
  showTokens(`${n} blockOut`, out);
}

function forward() {
  const { ids, x, final, logits } = buffers;
  dispatch(embed, [nEmbd, M], { ids, wte, wpe, tokens: nTokens, width: nEmbd, out: x[0] });
  showTokens("x embed", x[0]);
  for (let n = 0; n < nLayer; n++) block(n);
  const last = x[(has("ln_f reads the other buffer") ? nLayer + 1 : nLayer) % 2];
  if (has("no ln_f")) mem.copyWithin(final, last, last + M * nEmbd);
  else layerNorm(last, final, lnF);
  showTokens("x normF", final);
  dispatch(matmul, [nVocabTiled, M], { in: final, out: logits, weight: wte, nIn: nEmbd, nOut: nVocabTiled, turned: true });
  show("logits", logits, [nTexts, nTokens, has("logits of whole tiles") ? nVocabTiled : nVocab], nVocabTiled);
}

function writeNpy(name, { shape, data }) {
  const descr = dtype === "float64" ? "<f8" : "<f4";
  const text = `{'descr': '${descr}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  const head = Buffer.from(`\x93NUMPY\x01\x00\x76\x00${text.padEnd(117)}\n`, "latin1");
  writeFileSync(`${outFolder}/${name}.npy`, Buffer.concat([head, Buffer.from(data.buffer, data.byteOffset, data.byteLength)]));
}

forward();
for (const [name, array] of shown) writeNpy(name, array);
