// GPT-2 in node: a batch of prompts at once on flat typed arrays, then the rest of each row one token at a time from the caches.
// Usage: node prefill.mjs model.safetensors ids.txt out-folder ";fault;fault;" heads float32|float64
import { readFileSync, writeFileSync } from "node:fs";

const [, , modelFile, idsFile, outFolder, faults, headCount, dtype] = process.argv;
const STEPS = 4; // so many tokens of each row come after the prompt
const Floats = dtype === "float64" ? Float64Array : Float32Array;
const has = (fault) => faults.includes(`;${fault};`);

class Weights {
  constructor(file) {
    const bytes = readFileSync(file);
    const headerSize = Number(bytes.readBigUInt64LE(0));
    this.header = JSON.parse(bytes.toString("utf8", 8, 8 + headerSize));
    this.data = bytes.subarray(8 + headerSize);
  }
  shape(name) {
    return this.header[name].shape;
  }
  get(name) {
    const [begin, end] = this.header[name].data_offsets;
    const copy = this.data.buffer.slice(this.data.byteOffset + begin, this.data.byteOffset + end);
    return Floats.from(new Float32Array(copy));
  }
  layer(name, biased = true) {
    const b = this.get(`${name}.bias`);
    return { w: this.get(`${name}.weight`), b: biased && !has("no biases") ? b : new Floats(b.length) };
  }
  norm(name, loaded = true) {
    if (!loaded) {
      const [size] = this.shape(`${name}.weight`);
      return { g: new Floats(size).fill(1), b: new Floats(size) };
    }
    const { w, b } = this.layer(name);
    return { g: w, b };
  }
}

const weights = new Weights(modelFile);
const rows = readFileSync(idsFile, "utf8").trim().split("\n").map((line) => line.trim().split(/\s+/).map(Number));
const [V, D] = weights.shape("wte.weight");
const B = rows.length;
const T = rows[0].length;
const H = Number(headCount);
const d = D / H;
const L = Object.keys(weights.header).filter((name) => name.endsWith(".ln_1.weight")).length;
const wte = weights.get("wte.weight");
const wpe = weights.get("wpe.weight");
const lnF = weights.norm("ln_f");
const model = Array.from({ length: L }, (_, n) => ({
  n,
  ln1: weights.norm(`h.${n}.ln_1`),
  attn: weights.layer(`h.${n}.attn.c_attn`),
  proj: weights.layer(`h.${n}.attn.c_proj`),
  ln2: weights.norm(`h.${n}.ln_2`, n > 0 || !has("first block's ln_2 keeps its defaults")),
  fc: weights.layer(`h.${n}.mlp.c_fc`, !has("c_fc without bias")),
  down: weights.layer(`h.${n}.mlp.c_proj`),
}));
const empty = () => ({ k: new Floats(B * T * D), v: new Floats(B * T * D) });
const caches = has("fill shares one cache") ? new Array(L).fill(empty()) : Array.from({ length: L }, empty);

// What is shown: for each name, the numbers of all rows and tokens; a chunk fills in its own tokens.
const shown = new Map();
function show(name, chunk, n, start) {
  const size = chunk.length / (B * n);
  if (!shown.has(name)) shown.set(name, { shape: [B, T, size], data: new Floats(B * T * size) });
  for (let b = 0; b < B; b++) {
    shown.get(name).data.set(chunk.subarray(b * n * size, (b + 1) * n * size), (b * T + start) * size);
  }
}
function showPair(name, b, h, i, j, value) {
  if (!shown.has(name)) shown.set(name, { shape: [B, H, T, T], data: new Floats(B * H * T * T) });
  shown.get(name).data[((b * H + h) * T + i) * T + j] = value;
}

function layerNorm(x, { g, b }, out = new Floats(x.length)) {
  for (let row = 0; row < x.length; row += D) {
    let mean = 0;
    for (let i = 0; i < D; i++) mean += x[row + i];
    mean /= D;
    let square = 0;
    for (let i = 0; i < D; i++) square += (x[row + i] - mean) ** 2;
    square /= has("n - 1") ? D - 1 : D;
    const deviation = Math.sqrt(square + (has("eps 1e-3") ? 1e-3 : 1e-5));
    for (let i = 0; i < D; i++) out[row + i] = ((x[row + i] - mean) / deviation) * g[i] + b[i];
  }
  return out;
}

// x (rows, nIn) times w, stored as (nIn, nOut) the way GPT-2 has it, or as (nOut, nIn) where `linear`.
function project(x, { w, b }, linear = false) {
  const nOut = b.length;
  const nIn = w.length / nOut;
  const out = new Floats((x.length / nIn) * nOut);
  for (let row = 0; row * nIn < x.length; row++) {
    for (let o = 0; o < nOut; o++) {
      let sum = b[o];
      for (let i = 0; i < nIn; i++) sum += x[row * nIn + i] * (linear ? w[o * nIn + i] : w[i * nOut + o]);
      out[row * nOut + o] = sum;
    }
  }
  return out;
}

function gelu(x) {
  if (has("relu")) return Math.max(0, x);
  if (has("sigmoid gelu")) return x / (1 + Math.exp(-1.702 * x));
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

const add = (one, other) => one.map((value, at) => value + other[at]);

function thirds(qkv) {
  const parts = [0, 1, 2].map(() => new Floats(qkv.length / 3));
  const order = has("v before k") ? [0, 2, 1] : [0, 1, 2];
  for (let row = 0; row * 3 * D < qkv.length; row++) {
    for (let i = 0; i < D; i++) {
      const head = Math.floor(i / d);
      for (let p = 0; p < 3; p++) {
        const from = has("thirds inside heads") ? (head * 3 + p) * d + (i % d) : order[p] * D + i;
        parts[p][row * D + i] = qkv[row * 3 * D + from];
      }
    }
  }
  return parts;
}

// Where number i of head h of token t is, in one row of a chunk of n tokens.
const inHead = (h, t, i, n) => (has("heads without transpose") ? (h * n + t) * d + i : t * D + h * d + i);

function attention(block, x, n, start) {
  const label = (part) => `${block.n} ${part}`;
  const qkv = project(x, block.attn, has("c_attn as linear"));
  const [q, k, v] = thirds(qkv);
  for (const [part, chunk] of Object.entries({ qkv, q, k, v })) show(label(part), chunk, n, start);
  const cache = caches[block.n];
  const cacheAt = (b, t, h) => ((has("row not in the cache's offset") ? 0 : b * T) + t) * D + h * d;
  const append = () => {
    for (let b = 0; b < B; b++)
      for (let t = 0; t < n; t++)
        for (let h = 0; h < H; h++)
          for (let i = 0; i < d; i++) {
            cache.k[cacheAt(b, start + t, h) + i] = k[b * n * D + inHead(h, t, i, n)];
            cache.v[cacheAt(b, start + t, h) + i] = v[b * n * D + inHead(h, t, i, n)];
          }
  };
  const late = start > 0 && has("step before its own key");
  if (!late) append();
  const total = late ? start : start + n;
  let factor = has("times the root") ? Math.sqrt(d) : 1 / Math.sqrt(d);
  if (has("no scale")) factor = 1;
  const mixed = new Floats(B * n * D);
  for (let b = 0; b < B; b++)
    for (let h = 0; h < H; h++)
      for (let i = 0; i < n; i++) {
        const row = new Floats(total);
        for (let j = 0; j < total; j++) {
          let dot = 0;
          for (let c = 0; c < d; c++) dot += q[b * n * D + inHead(h, i, c, n)] * cache.k[cacheAt(b, j, h) + c];
          row[j] = dot * factor;
          showPair(label("scores"), b, h, start + i, j, row[j]);
          const future = j > start + i + (has("j > i + 1") ? 1 : 0);
          if (future && !has("prompt without mask")) row[j] = has("masked scores are 0") ? 0 : -Infinity;
        }
        const most = Math.max(...row);
        const raised = row.map((score) => Math.exp(score - most));
        const sum = raised.reduce((whole, one) => whole + one, 0);
        for (let j = 0; j < total; j++) {
          const weight = raised[j] / sum;
          showPair(label("weights"), b, h, start + i, j, weight);
          for (let c = 0; c < d; c++) mixed[b * n * D + inHead(h, i, c, n)] += weight * cache.v[cacheAt(b, j, h) + c];
        }
      }
  if (late) append();
  show(label("mixed"), mixed, n, start);
  return has("no attention projection") ? mixed : project(mixed, block.proj, has("c_proj as linear"));
}

function mlp(block, x, n, start) {
  const up = project(x, block.fc);
  const act = up.map(gelu);
  show(`${block.n} up`, up, n, start);
  show(`${block.n} act`, act, n, start);
  return project(act, block.down, has("mlp's c_proj as linear"));
}

function runBlock(block, x, n, start) {
  const keep = (part, chunk) => {
    show(`${block.n} ${part}`, chunk, n, start);
    return chunk;
  };
  const second = has("ln_1 for both") ? block.ln1 : block.ln2;
  if (has("norms after the sums")) {
    const attended = keep("attended", attention(block, x, n, start));
    const middle = keep("middle", keep("ln_1", layerNorm(add(x, attended), block.ln1)));
    const sum = add(middle, keep("fed", mlp(block, middle, n, start)));
    return keep("result", keep("ln_2", layerNorm(sum, second)));
  }
  const normed = keep("ln_1", layerNorm(x, block.ln1, has("norm writes into the stream") ? x : undefined));
  const attended = keep("attended", attention(block, normed, n, start));
  const middle = keep("middle", add(x, attended));
  const fed = keep("fed", mlp(block, keep("ln_2", layerNorm(has("mlp beside attention") ? x : middle, second)), n, start));
  return keep("result", has("no mlp skip") ? fed : add(middle, fed));
}

function forward(n, start) {
  let x = new Floats(B * n * D);
  const positions = new Floats(B * n);
  for (let b = 0; b < B; b++)
    for (let t = 0; t < n; t++) {
      let position = start + t + (has("wpe from 1") ? 1 : 0);
      if (start > 0 && has("steps count from 0")) position -= T - STEPS;
      positions[b * n + t] = position;
      const token = rows[b][start + t];
      for (let i = 0; i < D; i++) x[(b * n + t) * D + i] = wte[token * D + i] + (has("no wpe") ? 0 : wpe[position * D + i]);
    }
  show("x positions", positions, n, start);
  show("x embedded", x, n, start);
  const blocks = has("first block skipped") ? model.slice(1) : [...model];
  while (blocks.length) x = runBlock(has("blocks popped") ? blocks.pop() : blocks.shift(), x, n, start);
  const final = has("no ln_f") ? x : layerNorm(x, lnF);
  show("x final", final, n, start);
  const logits = project(final, { w: wte, b: new Floats(V) }, true);
  show("logits", has("temperature") ? logits.map((logit) => logit / 0.8) : logits, n, start);
}

function writeNpy(name, { shape, data }) {
  const kind = dtype === "float64" ? "<f8" : "<f4";
  const header = `{'descr': '${kind}', 'fortran_order': False, 'shape': (${shape.join(", ")}), }`;
  const start = Buffer.from("\x93NUMPY\x01\x00v\x00" + header.padEnd(117) + "\n", "latin1");
  writeFileSync(`${outFolder}/${name}.npy`, Buffer.concat([start, Buffer.from(data.buffer)]));
}

forward(T - STEPS, 0);
for (let start = T - STEPS; start < T; start++) forward(1, start);
for (const [name, array] of shown) writeNpy(name, array);
