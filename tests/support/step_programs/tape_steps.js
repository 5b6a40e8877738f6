// A GPT-2 in JavaScript that trains: matrices on a tape, whose backward functions run in reverse, and AdamW. For node alone.
//
//   node tape_steps.js RUN.bin OUT_FOLDER FAULTS
//
// RUN.bin: int32 V P C L H F B T steps parts; float64 rate, betas, decay, clip; float32 wte, wpe, each kind of tensor of a block
// over all blocks, matrices [in, out], the final norm; int32 ids and next ids (steps, B, T). FAULTS: words, "" for none.
// OUT_FOLDER gets .npy files: each block's tensors, matrices [out, in], q, k and v apart.
"use strict";
const fs = require("fs");
const [runFile, folder, line = ""] = process.argv.slice(2);
const faults = new Set(line.split(" ").filter(Boolean)), has = (word) => faults.has(word);

class Matrix {
  constructor(rows, columns, values = new Float32Array(rows * columns)) {
    Object.assign(this, { rows, columns, values, grad: new Float32Array(rows * columns) });
  }
}

const tape = [];
// A result with its backward function, which is called with the result's gradient.
function recorded(rows, columns, values, back) {
  const out = new Matrix(rows, columns, Float32Array.from(values));
  tape.push(() => back(out.grad));
  return out;
}

function accumulate(to, gradient) {
  for (let i = 0; i < gradient.length; i++) to.grad[i] = has("tape-overwrites") ? gradient[i] : to.grad[i] + gradient[i];
}

// x times the transpose of w, plus a bias; w is [out, in].
function linear(x, w, bias) {
  const [n, from, to] = [x.rows, x.columns, w.rows], y = new Float64Array(n * to);
  for (let i = 0; i < n; i++)
    for (let o = 0; o < to; o++) {
      let sum = bias ? bias.values[o] : 0;
      for (let c = 0; c < from; c++) sum += x.values[i * from + c] * w.values[o * from + c];
      y[i * to + o] = sum;
    }
  return recorded(n, to, y, (d) => {
    const dx = new Float64Array(n * from), dw = new Float64Array(to * from), db = new Float64Array(to);
    for (let i = 0; i < n; i++)
      for (let o = 0; o < to; o++) {
        const e = d[i * to + o];
        db[o] += e;
        for (let c = 0; c < from; c++) (dx[i * from + c] += e * w.values[o * from + c]), (dw[o * from + c] += e * x.values[i * from + c]);
      }
    accumulate(x, dx), accumulate(w, dw);
    if (bias) accumulate(bias, db);
  });
}

function add(a, b) {
  return recorded(a.rows, a.columns, a.values.map((value, i) => value + b.values[i]), (d) => (accumulate(a, d), accumulate(b, d)));
}

function rowsOf(table, ids) {
  const width = table.columns, values = ids.flatMap((id) => [...table.values.subarray(id * width, (id + 1) * width)]);
  return recorded(ids.length, width, values, (d) => {
    const dtable = new Float64Array(table.values.length);
    ids.forEach((id, i) => {
      for (let c = 0; c < width; c++) dtable[id * width + c] = d[i * width + c] + (has("repeats-lost") ? 0 : dtable[id * width + c]);
    });
    if (!(has("rows-detached") && table === wte)) accumulate(table, dtable);
  });
}

function norm(x, gain, bias) {
  const C = x.columns, z = new Float64Array(x.values.length), scale = new Float64Array(x.rows);
  for (let i = 0; i < x.rows; i++) {
    const row = x.values.subarray(i * C, (i + 1) * C), mean = row.reduce((sum, value) => sum + value, 0) / C;
    scale[i] = 1 / Math.sqrt(row.reduce((sum, value) => sum + (value - mean) ** 2, 0) / C + 1e-5);
    for (let c = 0; c < C; c++) z[i * C + c] = (row[c] - mean) * scale[i];
  }
  return recorded(x.rows, C, z.map((value, i) => value * gain.values[i % C] + bias.values[i % C]), (d) => {
    const dx = new Float64Array(d.length), dgain = new Float64Array(C), dbias = new Float64Array(C);
    for (let i = 0; i < x.rows; i++) {
      let mean = 0, along = 0;
      for (let c = 0; c < C; c++) {
        const at = i * C + c, e = d[at] * gain.values[c];
        (mean += e / C), (along += (e * z[at]) / C), (dgain[c] += d[at] * z[at]), (dbias[c] += d[at]);
      }
      if (has("norm-without-statistics")) mean = along = 0;
      for (let c = 0; c < C; c++) dx[i * C + c] = scale[i] * (d[i * C + c] * gain.values[c] - mean - z[i * C + c] * along);
    }
    accumulate(x, dx), accumulate(gain, dgain), accumulate(bias, dbias);
  });
}

function gelu(x) {
  const k = Math.sqrt(2 / Math.PI), inner = (v) => Math.tanh(k * (v + 0.044715 * v ** 3));
  return recorded(x.rows, x.columns, x.values.map((v) => 0.5 * v * (1 + inner(v))), (d) => {
    accumulate(x, d.map((e, i) => {
      const v = x.values[i], t = inner(v), s = 1 / (1 + Math.exp(-1.702 * v));
      if (has("gelu-slope-approximate")) return e * (s + 1.702 * v * s * (1 - s));
      return e * (0.5 * (1 + t) + 0.5 * v * (1 - t * t) * k * (1 + 3 * 0.044715 * v * v));
    }));
  });
}

function attention(q, k, v) {
  const C = q.columns, K = C / H, y = new Float64Array(q.values.length), weights = [];
  const dot = (a, i, b, j) => {
    let sum = 0;
    for (let c = 0; c < K; c++) sum += a[i + c] * b[j + c];
    return sum;
  };
  for (let b = 0; b < q.rows / T; b++)
    for (let h = 0; h < H; h++)
      for (let t = 0; t < T; t++) {
        const at = (s) => (b * T + s) * C + h * K, raised = [];
        for (let s = 0; s <= t; s++) raised.push(Math.exp(dot(q.values, at(t), k.values, at(s)) / Math.sqrt(K)));
        const total = raised.reduce((sum, value) => sum + value, 0), p = raised.map((value) => value / total);
        p.forEach((share, s) => { for (let c = 0; c < K; c++) y[at(t) + c] += share * v.values[at(s) + c]; });
        weights.push([at, t, p]);
      }
  return recorded(q.rows, C, y, (d) => {
    const [dq, dk, dv] = [0, 0, 0].map(() => new Float64Array(d.length));
    for (const [at, t, p] of weights) {
      const dp = p.map((_, s) => dot(d, at(t), v.values, at(s)));
      const sum = has("softmax-derivative") ? 0 : p.reduce((total, share, s) => total + share * dp[s], 0);
      p.forEach((share, s) => {
        const ds = (share * (dp[s] - sum)) / Math.sqrt(K);
        for (let c = 0; c < K; c++) {
          dv[at(s) + c] += share * d[at(t) + c];
          dq[at(t) + c] += ds * k.values[at(s) + c], (dk[at(s) + c] += ds * q.values[at(t) + c]);
        }
      });
    }
    if (has("keys-detached")) dk.fill(0);
    accumulate(q, dq), accumulate(k, dk), accumulate(v, dv);
  });
}

// The loss; its gradient goes into the logits.
function crossEntropy(logits, labels, share) {
  const V = logits.columns, heat = has("temperature") ? 0.8 : 1, smooth = has("smoothed") ? 0.1 : 0;
  const count = has("summed") ? 1 : has("summed-by-row") ? labels.length / T : labels.length;
  let loss = 0;
  labels.forEach((label, i) => {
    const row = Float64Array.from(logits.values.subarray(i * V, (i + 1) * V), (x) => x * heat), top = Math.max(...row);
    const total = row.reduce((sum, x) => sum + Math.exp(x - top), 0);
    row.forEach((x, o) => {
      const target = (o === label ? 1 - smooth : 0) + smooth / V, log = x - top - Math.log(total);
      loss -= (target * log) / count;
      logits.grad[i * V + o] = ((Math.exp(log) - target) * heat * share) / count;
    });
  });
  return loss;
}

function forward(ids) {
  let x = add(rowsOf(wte, ids), rowsOf(w.wpe, ids.map((_, i) => i % T)));
  for (const b of w.blocks) {
    const a = norm(x, b.ln1g, b.ln1b);
    const [q, k, v] = ["q", "k", "v"].map((letter) => linear(a, b[letter + "w"], b[letter + "b"]));
    x = add(x, linear(attention(q, k, v), b.ow, b.ob));
    x = add(x, linear(gelu(linear(norm(x, b.ln2g, b.ln2b), b.upw, b.upb)), b.downw, b.downb));
  }
  const head = has("tied-lost") ? new Matrix(wte.rows, wte.columns, wte.values) : wte;
  return linear(norm(x, w.lnfg, w.lnfb), head);
}

function labelsOf(ids, next) {
  if (has("unshifted")) return ids;
  return has("shifted-twice") ? next.map((id, i) => ((i + 1) % T ? next[i + 1] : next[i])) : next;
}

const norm2 = (matrices) => Math.sqrt(matrices.reduce((sum, m) => sum + m.grad.reduce((own, e) => own + e * e, 0), 0));

function clip(all) {
  const scaled = (m, factor) => m.grad.forEach((e, i) => (m.grad[i] = e * factor));
  if (has("unclipped")) return;
  if (has("clipped-by-value")) return all.forEach((m) => m.grad.forEach((e, i) => (m.grad[i] = Math.max(-0.05, Math.min(0.05, e)))));
  if (has("clipped-by-tensor")) return all.forEach((m) => scaled(m, Math.min(1, limit / 4 / norm2([m]))));
  const factor = limit / norm2(has("matrices-in-norm-only") ? all.filter((m) => m.columns > 1) : all);
  if (factor < 1) all.forEach((m) => scaled(m, factor));
}

let calls = 0;
function update(all, names, t) {
  const second = has("betas-default") ? 0.999 : beta2, constant = has("rate-not-set") ? 1e-3 * 3 : rate;
  all.forEach((p, n) => {
    const count = has("counted-per-tensor") ? ++calls : t, [c1, c2] = has("uncorrected") ? [1, 1] : [1 - beta1 ** count, 1 - second ** count];
    if (has("norms-left-out") && /ln/.test(names[n])) return;
    const decayed = has("decay-on-all") || p.columns > 1 ? (has("decay-tenth") ? decay / 10 : decay) : 0;
    p.m ??= new Float64Array(p.grad.length), (p.v ??= new Float64Array(p.grad.length));
    p.grad.forEach((e, i) => {
      if (has("sgd")) return void (p.values[i] -= constant * (e + decayed * p.values[i]));
      p.m[i] = beta1 * p.m[i] + (1 - beta1) * e, (p.v[i] = second * p.v[i] + (1 - second) * e * e);
      const root = has("eps-inside") ? Math.sqrt(p.v[i] / c2 + 1e-8) : Math.sqrt(p.v[i] / c2) + 1e-8;
      const pull = has("decay-missing") ? 0 : (has("decay-without-rate") ? 1 : constant) * decayed * p.values[i];
      p.values[i] -= (constant * p.m[i]) / c1 / root + pull;
    });
  });
}

// Files.
const bytes = fs.readFileSync(runFile);
let offset = 0;
const read = (n, size, method) => Array.from({ length: n }, () => ((offset += size), bytes[method](offset - size)));
const [V, P, C, L, H, F, B, T, steps, parts] = read(10, 4, "readInt32LE");
const [rate, beta1, beta2, decay, limit] = read(5, 8, "readDoubleLE");
const matrix = (rows, columns) => new Matrix(rows, columns, Float32Array.from(read(rows * columns, 4, "readFloatLE")));
const turned = (m) => new Matrix(m.columns, m.rows, m.values.map((_, i) => m.values[(i % m.rows) * m.columns + Math.floor(i / m.rows)]));
const part = (m, n) => new Matrix(C, m.columns, m.values.slice(n * C * m.columns, (n + 1) * C * m.columns));
const wte = matrix(V, C), w = { wpe: matrix(P, C), blocks: Array.from({ length: L }, () => ({})) };
for (const [name, rows, columns] of [["ln1g", C, 1], ["ln1b", C, 1], ["qkvw", C, 3 * C], ["qkvb", 3 * C, 1], ["ow", C, C], ["ob", C, 1],
  ["ln2g", C, 1], ["ln2b", C, 1], ["upw", C, F], ["upb", F, 1], ["downw", F, C], ["downb", C, 1]])
  for (const block of w.blocks) {
    const own = matrix(rows, columns), laid = columns > 1 ? turned(own) : own;
    if (name.startsWith("qkv")) ["q", "k", "v"].forEach((letter, n) => (block[letter + name[3]] = part(laid, n)));
    else block[name] = laid;
  }
(w.lnfg = matrix(C, 1)), (w.lnfb = matrix(C, 1));
const ids = read(steps * B * T, 4, "readInt32LE"), next = read(steps * B * T, 4, "readInt32LE");
const named = { wte, wpe: w.wpe, lnfg: w.lnfg, lnfb: w.lnfb };
w.blocks.forEach((block, n) => Object.entries(block).forEach(([name, m]) => (named[`${n}.${name}`] = m)));
const all = Object.values(named), names = Object.keys(named);

function dump(name, values, shape) {
  const header = `{'descr': '<f4', 'fortran_order': False, 'shape': (${shape.join(", ")},)}`;
  const start = Buffer.from("\x93NUMPY\x01\x00\x76\x00" + header.padEnd(117) + "\n", "latin1");
  fs.writeFileSync(`${folder}/${name}.npy`, Buffer.concat([start, Buffer.from(values.buffer, values.byteOffset, values.byteLength)]));
}
const dumpAll = (what, step, key) =>
  all.forEach((m, n) => dump(`${what}.${step}.${names[n]}`, m[key], m.columns > 1 ? [m.rows, m.columns] : [m.rows]));

fs.mkdirSync(folder, { recursive: true });
dumpAll("b", 0, "values");
for (let step = 0; step < steps; step++) {
  if (!has("not-zeroed")) all.forEach((m) => m.grad.fill(0));
  let loss = 0;
  for (let n = 0; n < parts; n++) {
    if (has("last-part")) all.forEach((m) => m.grad.fill(0));
    const from = (step * parts + n) * (B / parts) * T, own = ids.slice(from, from + (B / parts) * T);
    const share = has("parts-summed") ? 1 : 1 / parts, logits = forward(own);
    loss += share * crossEntropy(logits, labelsOf(own, next.slice(from, from + own.length)), share);
    while (tape.length) tape.pop()();
  }
  dump(`l.${step}`, Float32Array.of(loss), [1]);
  dumpAll("g", step, "grad");
  clip(all);
  dumpAll("c", step, "grad");
  update(all, names, step + 1);
  dumpAll("p", step, "values");
}
