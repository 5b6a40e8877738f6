//! GPT-2 in Rust over flat buffers, batch first, with matrices turned to [out, in] as they are loaded; writes every value as .npy.
//! gpt2 WEIGHTS IDS OUT HEADS 'fault;fault'. With `--cfg single`, everything is computed in float32, else in float64.
use std::{collections::HashMap, env, f64::consts::PI, fs};

#[cfg(single)]
type F = f32;
#[cfg(not(single))]
type F = f64;

#[derive(Clone)]
struct Mat {
    rows: usize,
    cols: usize,
    data: Vec<F>,
}

impl Mat {
    fn zeros(rows: usize, cols: usize) -> Mat {
        Mat { rows, cols, data: vec![0.0; rows * cols] }
    }
    fn row(&self, r: usize) -> &[F] {
        &self.data[r * self.cols..(r + 1) * self.cols]
    }
    fn turned(&self) -> Mat {
        let data = (0..self.rows * self.cols).map(|i| self.data[i % self.rows * self.cols + i / self.rows]).collect();
        Mat { rows: self.cols, cols: self.rows, data }
    }
    fn as_it_lies(&self) -> Mat {
        Mat { rows: self.cols, cols: self.rows, data: self.data.clone() }
    }
    fn map(&self, f: impl Fn(F) -> F) -> Mat {
        Mat { data: self.data.iter().map(|a| f(*a)).collect(), ..*self }
    }
    fn plus(&self, other: &Mat, by: F) -> Mat {
        Mat { data: self.data.iter().zip(&other.data).map(|(a, b)| a + by * b).collect(), ..*self }
    }
    /// x [rows, in] times w [out, in], transposed, plus the bias.
    fn linear(&self, w: &Mat, bias: Option<&Mat>) -> Mat {
        let mut out = Mat::zeros(self.rows, w.rows);
        for r in 0..self.rows {
            for o in 0..w.rows {
                let sum: F = self.row(r).iter().zip(w.row(o)).map(|(a, b)| a * b).sum();
                out.data[r * w.rows + o] = sum + bias.map_or(0.0, |b| b.data[o]);
            }
        }
        out
    }
}

/// erf by a series of positive terms.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= 2.0 * x * x / (2 * n + 1) as f64;
        sum += term;
    }
    (sum * 2.0 / PI.sqrt() * (-x * x).exp()).clamp(-1.0, 1.0)
}

struct Gpt {
    w: HashMap<String, Mat>,
    faults: Vec<String>,
    heads: usize,
    batch: usize,
    tokens: usize,
    layers: usize,
    out: String,
}

impl Gpt {
    fn has(&self, fault: &str) -> bool {
        self.faults.iter().any(|one| one == fault)
    }

    fn keep(&self, name: &str, shape: &[usize], data: &[F]) {
        let sizes: Vec<String> = shape.iter().map(|n| n.to_string()).collect();
        let kind = if size_of::<F>() == 4 { "<f4" } else { "<f8" };
        let mut head = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({},), }}", sizes.join(", "));
        while (head.len() + 11) % 64 != 0 {
            head.push(' ');
        }
        head.push('\n');
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((head.len() as u16).to_le_bytes());
        bytes.extend(head.as_bytes());
        data.iter().for_each(|a| bytes.extend(a.to_le_bytes()));
        fs::write(format!("{}/{name}.npy", self.out), bytes).unwrap();
    }

    fn keep_rows(&self, name: &str, x: &Mat) {
        self.keep(name, &[self.batch, self.tokens, x.cols], &x.data);
    }

    /// What the loader makes of the file: matrices [out, in], and the mistakes of reading.
    fn load(&mut self) {
        let original = self.w.clone();
        let last = self.layers - 1;
        for (name, m) in self.w.iter_mut() {
            let faults = &self.faults;
            let has = |fault: &str| faults.iter().any(|one| one == fault);
            let part = name.splitn(3, '.').nth(2).unwrap_or("").to_string();
            let take = |other: &str| original[&name.replace(&part, other)].clone();
            let block = |n: usize| original[&format!("h.{n}.{part}")].clone();
            if has("every block is the first") && part != "" {
                *m = block(0);
            } else if has("last two blocks exchanged") && name.starts_with(&format!("h.{last}.")) {
                *m = block(last - 1);
            } else if has("last two blocks exchanged") && name.starts_with(&format!("h.{}.", last - 1)) {
                *m = block(last);
            }
            if has("second norm of the block before") && part.starts_with("ln_2") && name.starts_with("h.1.") {
                *m = block(0);
            }
            if has("qkv bias of the last block") && part == "attn.c_attn.bias" {
                *m = block(last);
            }
            if has("gain and shift exchanged") && part.starts_with("ln_2") {
                *m = take(if part.ends_with("weight") { "ln_2.bias" } else { "ln_2.weight" });
            }
            if has("shift zero") && part.starts_with("ln_1.bias") || has("down bias zero") && part == "mlp.c_proj.bias" {
                m.data.fill(0.0);
            }
            if has("gains one") && part == "ln_1.weight" {
                m.data.fill(1.0);
            }
            if has("positions loaded backwards") && name == "wpe.weight" {
                *m = Mat { data: (0..m.rows).rev().flat_map(|r| m.row(r).to_vec()).collect(), ..*m };
            }
            if has("tokens one row late") && name == "wte.weight" {
                m.data.rotate_right(m.cols);
            }
            if has("float16 matrices") && m.rows > 1 && part != "" {
                *m = m.map(|a| half(a as f64) as F);
            }
            if has("bfloat16 tables") && (name == "wte.weight" || name == "wpe.weight") {
                *m = m.map(|a| f32::from_bits((a as f32).to_bits() + 0x7fff + ((a as f32).to_bits() >> 16 & 1) & 0xffff0000) as F);
            }
            if has("two decimals") && part == "mlp.c_fc.weight" {
                *m = m.map(|a| (a * 100.0).round() / 100.0);
            }
            if part.ends_with(".weight") && m.rows > 1 {
                let square = has("projection not turned") && part == "attn.c_proj.weight";
                let lies = has("up as it lies") && part == "mlp.c_fc.weight"
                    || has("down as it lies in the last block") && name == &format!("h.{last}.mlp.c_proj.weight");
                *m = if square { m.clone() } else if lies { m.as_it_lies() } else { m.turned() };
            }
            if has("keys not turned") && part == "attn.c_attn.weight" {
                let width = m.cols;
                let old = m.clone();
                for (r, c) in (0..width).flat_map(|r| (0..width).map(move |c| (r, c))) {
                    m.data[(width + r) * width + c] = old.data[(width + c) * width + r];
                }
            }
        }
    }

    fn norm(&self, x: &Mat, name: &str) -> Mat {
        let mut y = x.clone();
        let (gain, shift) = (&self.w[&format!("{name}.weight")], &self.w[&format!("{name}.bias")]);
        let over_tokens = self.has("over tokens") && name != "ln_f";
        let (groups, size) = if over_tokens { (self.batch * x.cols, self.tokens) } else { (x.rows, x.cols) };
        for g in 0..groups {
            let place = |i: usize| match over_tokens {
                true => (g / x.cols * self.tokens + i) * x.cols + g % x.cols,
                false => g * x.cols + i,
            };
            let n = size as F;
            let mean = if self.has("root mean square") { 0.0 } else { (0..size).map(|i| x.data[place(i)]).sum::<F>() / n };
            let square: F = (0..size).map(|i| (x.data[place(i)] - mean).powi(2)).sum();
            let var = square / if self.has("bessel in the last norm") && name == "ln_f" { n - 1.0 } else { n };
            let eps: F = if self.has("eps 1e-6") { 1e-6 } else if self.has("eps a hundredth") { 1e-2 } else { 1e-5 };
            let root = if self.has("eps behind the root") { var.sqrt() + eps } else { (var + eps).sqrt() };
            for p in (0..size).map(place) {
                let c = p % x.cols;
                y.data[p] = (x.data[p] - mean) / root * gain.data[c] + shift.data[c];
            }
        }
        y
    }

    fn active(&self, x: F) -> F {
        let a = x as f64;
        let root = (2.0 / PI).sqrt();
        let y = if self.has("erf") {
            0.5 * a * (1.0 + erf(a / 2f64.sqrt()))
        } else if self.has("mish") {
            a * a.exp().ln_1p().tanh()
        } else if self.has("leaky") {
            if a > 0.0 { a } else { 0.01 * a }
        } else if self.has("cube outside") {
            0.5 * a * (1.0 + (root * a + 0.044715 * a.powi(3)).tanh())
        } else if self.has("not halved") {
            a * (1.0 + (root * (a + 0.044715 * a.powi(3))).tanh())
        } else {
            0.5 * a * (1.0 + (root * (a + 0.044715 * a.powi(3))).tanh())
        };
        y as F
    }

    /// Which column of c_attn's result is query (0), key (1) or value (2) of head h, unit d.
    fn column(&self, which: usize, h: usize, d: usize, size: usize) -> usize {
        let width = self.heads * size;
        let which = if self.has("value query key") { (which + 1) % 3 } else { which };
        if self.has("thirds within heads") {
            return (h * 3 + which) * size + d;
        }
        which * width + if self.has("units before heads") { d * self.heads + h } else { h * size + d }
    }

    fn attention(&self, x: &Mat, n: usize) -> Mat {
        let (t_, width) = (self.tokens, x.cols);
        let size = width / self.heads;
        let name = format!("h.{n}.attn");
        let bias = Some(&self.w[&format!("{name}.c_attn.bias")]).filter(|_| !self.has("qkv without bias"));
        let all = x.linear(&self.w[&format!("{name}.c_attn.weight")], bias);
        let mut parts = vec![vec![0.0 as F; x.rows * width]; 3]; // each (B, H, T, K)
        for i in 0..x.rows * width {
            let (b, h, t, d) = (i / (width * t_), i / (size * t_) % self.heads, i / size % t_, i % size);
            for which in 0..3 {
                let flat = i % (width * t_); // of a sentence, for a split without a transpose
                parts[which][i] = match self.has("split as it lies") {
                    true => all.data[(b * t_ + flat / width) * 3 * width + which * width + flat % width],
                    false => all.data[(b * t_ + t) * 3 * width + self.column(which, h, d, size)],
                };
            }
        }
        if self.has("rotary") {
            for part in parts.iter_mut().take(2) {
                for i in (0..x.rows * width).filter(|i| i % size < size / 2) {
                    let angle = (i / size % t_) as f64 / 10000f64.powf(2.0 * (i % size) as f64 / size as f64);
                    let (a, b, c, s) = (part[i], part[i + size / 2], angle.cos() as F, angle.sin() as F);
                    (part[i], part[i + size / 2]) = (a * c - b * s, b * c + a * s);
                }
            }
        }
        let (q, k) = (&parts[0], &parts[1]);
        let v = if self.has("keys mixed") { &parts[1] } else { &parts[2] };
        let mut factor = 1.0 / (size as F).sqrt();
        factor = if self.has("root of tokens") { 1.0 / (t_ as F).sqrt() } else { factor };
        factor = if self.has("root of width") { 1.0 / (width as F).sqrt() } else { factor };
        factor *= if self.has("temperature") { 0.7 } else { 1.0 };
        factor /= if self.has("by layer") { (n + 1) as F } else { 1.0 };
        let mut scores = vec![0.0 as F; self.batch * self.heads * t_ * t_];
        let mut chances = scores.clone();
        let mut joined = Mat::zeros(x.rows, width);
        for g in 0..self.batch * self.heads {
            let at = |t: usize| (g * t_ + t) * size;
            for (i, j) in (0..t_).flat_map(|i| (0..t_).map(move |j| (i, j))) {
                scores[(g * t_ + i) * t_ + j] = factor * (0..size).map(|d| q[at(i) + d] * k[at(j) + d]).sum::<F>();
            }
            for i in 0..t_ {
                let row: Vec<F> = (0..t_)
                    .map(|j| {
                        let seen = if self.has("upside down") {
                            j >= i
                        } else if self.has("not itself") {
                            j < i || i == 0
                        } else {
                            j <= i + self.has("one ahead") as usize || self.has("no mask")
                        };
                        let hidden = if self.has("minus ten") { -10.0 } else { F::NEG_INFINITY };
                        let score = scores[(g * t_ + i) * t_ + j];
                        if seen { score } else if self.has("minus ten") { score + hidden } else { hidden }
                    })
                    .collect();
                let most = row.iter().fold(F::NEG_INFINITY, |a, b| a.max(*b));
                let powers: Vec<F> = row.iter().map(|a| (a - most).exp()).collect();
                let total: F = powers.iter().sum();
                for j in 0..t_ {
                    chances[(g * t_ + i) * t_ + j] = match self.has("no softmax") {
                        true if row[j].is_finite() => row[j],
                        true => 0.0,
                        false => powers[j] / total,
                    };
                }
                let (b, h) = (g / self.heads, g % self.heads);
                for d in 0..size {
                    let mixed: F = (0..t_).map(|j| chances[(g * t_ + i) * t_ + j] * v[at(j) + d]).sum();
                    let column = if self.has("merged by unit") { d * self.heads + h } else { h * size + d };
                    joined.data[(b * t_ + i) * width + column] = mixed;
                }
            }
        }
        let (b_, h_) = (self.batch, self.heads);
        let turned: Vec<F> = (0..k.len())
            .map(|i| k[i / (t_ * size) * t_ * size + i % t_ * size + i / t_ % size])
            .collect();
        self.keep(&format!("{n} q"), &[b_, h_, t_, size], q);
        self.keep(&format!("{n} k"), &[b_, h_, size, t_], &turned);
        self.keep(&format!("{n} v"), &[b_ * h_, t_, size], &parts[2]);
        self.keep(&format!("{n} scores"), &[b_, h_, t_, t_], &scores);
        self.keep(&format!("{n} chances"), &[b_ * h_, t_, t_], &chances);
        self.keep_rows(&format!("{n} joined"), &joined);
        if self.has("attention not projected") {
            return joined;
        }
        let bias = Some(&self.w[&format!("{name}.c_proj.bias")]).filter(|_| !self.has("projection without bias"));
        joined.linear(&self.w[&format!("{name}.c_proj.weight")], bias)
    }

    fn feed(&self, x: &Mat, n: usize) -> Mat {
        let get = |leaf: &str| &self.w[&format!("h.{n}.mlp.{leaf}")];
        let inner = x.linear(get("c_fc.weight"), Some(get("c_fc.bias")));
        let active = inner.map(|a| self.active(a));
        self.keep_rows(&format!("{n} inner"), &inner);
        self.keep_rows(&format!("{n} active"), &active);
        active.linear(get("c_proj.weight"), Some(get("c_proj.bias")))
    }

    fn block(&self, x: &Mat, n: usize) -> Mat {
        let first = self.norm(x, &format!("h.{n}.ln_1"));
        let branch = self.attention(if self.has("attention not normed") { x } else { &first }, n);
        let deep = 1.0 / (2.0 * self.layers as F).sqrt();
        let by = if self.has("branches by depth") { deep } else if self.has("attention twice") { 2.0 } else { 1.0 };
        let middle = x.plus(&branch, by);
        let second = self.norm(if self.has("side by side") { x } else { &middle }, &format!("h.{n}.ln_2"));
        let fed = self.feed(if self.has("feed not normed") { &middle } else { &second }, n);
        let stream = if self.has("feed added to its norm") { &second } else { &middle };
        let mut result = if self.has("feed replaces") { fed.clone() } else { stream.plus(&fed, by.min(1.0)) };
        if self.has("mean of stream and feed") {
            result = result.map(|a| a / 2.0);
        }
        for (name, value) in [("first", &first), ("branch", &branch), ("middle", &middle), ("second", &second)] {
            self.keep_rows(&format!("{n} {name}"), value);
        }
        self.keep_rows(&format!("{n} fed"), &fed);
        self.keep_rows(&format!("{n} result"), &result);
        result
    }

    fn run(&self, ids: &[Vec<usize>]) {
        let (table, places) = (&self.w["wte.weight"], &self.w["wpe.weight"]);
        let width = table.cols;
        let mut x = Mat::zeros(self.batch * self.tokens, width);
        for (r, id) in ids.iter().flatten().enumerate() {
            let t = r % self.tokens;
            let p = if self.has("positions run on") { r } else { t + 2 * self.has("from two") as usize };
            let by = if self.has("embedding over root") { 1.0 / (width as F).sqrt() } else { 1.0 };
            for c in 0..width {
                let place = if self.has("no positions") { 0.0 } else { places.row(p)[c] };
                x.data[r * width + c] = by * table.row(*id)[c] + place;
            }
        }
        self.keep_rows("start", &x);
        for n in 0..self.layers {
            if !(self.has("first block left out") && n == 0) {
                x = self.block(&x, n);
            }
            if self.has("last block twice") && n == self.layers - 1 {
                x = self.block(&x, n);
            }
        }
        let mut last = if self.has("head on the stream") { x } else { self.norm(&x, "ln_f") };
        if self.has("last norm twice") {
            last = self.norm(&last, "ln_f");
        }
        self.keep_rows("last", &last);
        let mut logits = last.linear(table, None);
        if self.has("logits over root") {
            logits = logits.map(|a| a / (width as F).sqrt());
        }
        if self.has("log of chances") {
            for r in 0..logits.rows {
                let row = logits.row(r).to_vec();
                let most = row.iter().fold(F::NEG_INFINITY, |a, b| a.max(*b));
                let total = row.iter().map(|a| (a - most).exp()).sum::<F>().ln() + most;
                row.iter().enumerate().for_each(|(c, a)| logits.data[r * logits.cols + c] = a - total);
            }
        }
        if self.has("padded vocabulary") {
            let wider = logits.cols + 5;
            let data = (0..logits.rows * wider).map(|i| if i % wider < wider - 5 { logits.row(i / wider)[i % wider] } else { 0.0 });
            logits = Mat { rows: logits.rows, cols: wider, data: data.collect() };
        }
        self.keep_rows("logits", &logits);
    }
}

/// Round to float16's eleven bits; no value here is large or tiny enough for another exponent.
fn half(a: f64) -> f64 {
    let step = 2f64.powi(a.abs().max(6.2e-5).log2().floor() as i32 - 10);
    (a / step).round_ties_even() * step
}

fn main() {
    let given: Vec<String> = env::args().collect();
    let bytes = fs::read(&given[1]).unwrap();
    let head = bytes.windows(2).position(|two| two == b"\n\n").unwrap();
    let mut at = head + 2;
    let mut w = HashMap::new();
    for line in std::str::from_utf8(&bytes[..head]).unwrap().lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let (rows, cols): (usize, usize) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        let floats = bytes[at..at + 4 * rows * cols].chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()) as F);
        w.insert(words[0].to_string(), Mat { rows, cols, data: floats.collect() });
        at += 4 * rows * cols;
    }
    let ids: Vec<Vec<usize>> = fs::read_to_string(&given[2])
        .unwrap()
        .lines()
        .map(|line| line.split(' ').map(|id| id.parse().unwrap()).collect())
        .collect();
    let faults = given[5].split(';').map(str::to_string).collect();
    let layers = w.keys().filter(|name| name.ends_with("ln_1.bias")).count();
    let (heads, out) = (given[4].parse().unwrap(), given[3].clone());
    let mut gpt = Gpt { w, faults, heads, batch: ids.len(), tokens: ids[0].len(), layers, out };
    gpt.load();
    gpt.run(&ids);
}
