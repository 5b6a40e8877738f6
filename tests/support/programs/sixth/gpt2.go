// GPT-2 as a small inference engine: flat slices, matrices as [out][in], a prompt and then a token at a time with a cache.
package main

import (
	"encoding/binary"
	"math"
	"os"
	"strings"
	"sync"
)

type real interface{ float32 | float64 }

var faults = map[string]bool{}

type record struct {
	shape []int
	data  []float64
}

type engine[F real] struct {
	B, T, C, H, L, V, ctx int
	w                     map[string][]F // stacked over the blocks
	keys, values          []F            // [L][H][ctx][hs] and [L][ctx][C]
	past, prompt          int            // tokens in the cache, tokens of the prompt
	sequence, row         int            // where records go
	mixed                 []F
	seen                  map[string]*record
	order                 []string
}

func (e *engine[F]) keep(name string, width int, values []F) {
	if e.seen[name] == nil {
		e.seen[name] = &record{[]int{e.B, e.T, width}, make([]float64, e.B*e.T*width)}
		e.order = append(e.order, name)
	}
	for i, v := range values {
		e.seen[name].data[(e.sequence*e.T+e.row)*width+i] = float64(v)
	}
}

// keepRow: a row of an array [B][H][T][width], cut off where a row is longer.
func (e *engine[F]) keepRow(name string, h, row, width int, values []F) {
	if e.seen[name] == nil {
		e.seen[name] = &record{[]int{e.B, e.H, e.T, width}, make([]float64, e.B*e.H*e.T*width)}
		e.order = append(e.order, name)
	}
	for i := 0; i < len(values) && i < width; i++ {
		e.seen[name].data[((e.sequence*e.H+h)*e.T+row)*width+i] = float64(values[i])
	}
}

func (e *engine[F]) norm(x []F, weight, bias []F) []F {
	out := make([]F, len(x))
	if faults["residual is the same slice"] {
		out = x
	}
	if faults["bias before weight"] {
		weight, bias = bias, weight
	}
	eps := F(1e-5)
	if faults["bert epsilon"] {
		eps = 1e-12
	}
	for i := 0; i < len(x); i += e.C {
		var mean, variance F
		for _, v := range x[i : i+e.C] {
			mean += v
		}
		mean /= F(e.C)
		if faults["llama norm"] {
			mean = 0
		}
		for _, v := range x[i : i+e.C] {
			variance += (v - mean) * (v - mean)
		}
		scale := 1 / F(math.Sqrt(float64(variance/F(e.C)+eps)))
		for j, v := range x[i : i+e.C] {
			out[i+j] = (v - mean) * scale
			if faults["llama norm"] {
				out[i+j] *= weight[j]
			} else {
				out[i+j] = out[i+j]*weight[j] + bias[j]
			}
		}
	}
	return out
}

func dot[F real](a, b []F) F {
	var sum F
	for i, v := range a {
		sum += v * b[i]
	}
	return sum
}

// linear: rows of x times w, [out][in], shared out among workers.
func linear[F real](x, w, b []F, in, out int) []F {
	rows := len(x) / in
	y := make([]F, rows*out)
	const workers = 8
	chunk := out / workers
	var group sync.WaitGroup
	for n := 0; n < workers; n++ {
		from, to := n*chunk, (n+1)*chunk
		if n == workers-1 && !(b == nil && faults["remainder of the head"]) {
			to = out
		}
		group.Add(1)
		go func() {
			defer group.Done()
			for i := 0; i < rows; i++ {
				for o := from; o < to; o++ {
					y[i*out+o] = dot(x[i*in:(i+1)*in], w[o*in:(o+1)*in])
					if b != nil {
						y[i*out+o] += b[o]
					}
				}
			}
		}()
	}
	group.Wait()
	return y
}

func gelu[F real](x F) F {
	v := float64(x)
	if faults["quick gelu"] {
		return F(v / (1 + math.Exp(-1.702*v)))
	}
	cube := v * v * v
	if faults["square for cube"] {
		cube = v * v
	}
	if faults["one half is zero"] {
		return F(1 / 2 * v * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*cube))))
	}
	return F(0.5 * v * (1 + math.Tanh(math.Sqrt(2/math.Pi)*(v+0.044715*cube))))
}

func softmax[F real](x []F) {
	max, sum := x[0], F(0)
	for _, v := range x {
		if v > max {
			max = v
		}
	}
	for i, v := range x {
		x[i] = F(math.Exp(float64(v - max)))
		sum += x[i]
	}
	for i := range x {
		x[i] /= sum
	}
}

func rotate[F real](x []F, hs, pos int) {
	for i := 0; i < len(x); i += 2 {
		angle := float64(pos) / math.Pow(10000, float64(i%hs)/float64(hs))
		c, s := F(math.Cos(angle)), F(math.Sin(angle))
		x[i], x[i+1] = x[i]*c-x[i+1]*s, x[i]*s+x[i+1]*c
	}
}

func half(v float64) float64 {
	if v == 0 {
		return 0
	}
	exponent := math.Ilogb(v)
	if exponent < -14 {
		exponent = -14
	}
	step := math.Ldexp(1, exponent-10)
	return math.RoundToEven(v/step) * step
}

func (e *engine[F]) keyAt(l, h, t, hs int, reading bool) int {
	if faults["cache without layers"] {
		l = 0
	}
	if reading && faults["keys read token first"] {
		return ((l*e.ctx+t)*e.H + h) * hs
	}
	return ((l*e.H+h)*e.ctx + t) * hs
}

func (e *engine[F]) valueAt(l, t int) int {
	if faults["cache without layers"] {
		l = 0
	}
	return (l*e.ctx + t) * e.C
}

// attend: n new tokens, whose keys and values go into the cache first.
func (e *engine[F]) attend(l int, qkv []F, n int, kept func(int)) []F {
	C, H, hs := e.C, e.H, e.C/e.H
	for i := 0; i < n; i++ {
		q, k, v := qkv[3*i*C:(3*i+1)*C], qkv[(3*i+1)*C:(3*i+2)*C], qkv[(3*i+2)*C:(3*i+3)*C]
		slot := e.past + i
		if faults["rope"] {
			rotate(q, hs, slot)
			rotate(k, hs, slot)
		}
		if faults["one slot for all steps"] && e.past > 0 {
			slot = e.prompt
		}
		for h := 0; h < H; h++ {
			copy(e.keys[e.keyAt(l, h, slot, hs, false):], k[h*hs:(h+1)*hs])
			for c := 0; c < hs && faults["half cache"]; c++ {
				at := e.keyAt(l, h, slot, hs, false) + c
				e.keys[at] = F(half(float64(e.keys[at])))
			}
		}
		copy(e.values[e.valueAt(l, slot):], v)
		for c := 0; c < C && faults["half cache"]; c++ {
			e.values[e.valueAt(l, slot)+c] = F(half(float64(v[c])))
		}
	}
	if e.mixed == nil || !faults["mixed not cleared"] {
		e.mixed = make([]F, n*C)
	}
	scale := F(math.Sqrt(float64(hs)))
	if faults["root of the heads"] {
		scale = F(math.Sqrt(float64(H)))
	}
	for i := 0; i < n; i++ {
		kept(i)
		seen := e.past + i + 1
		if faults["prompt sees everything"] && n > 1 {
			seen = e.past + n
		}
		if faults["step does not see itself"] && n == 1 && e.past > 0 {
			seen--
		}
		att := make([]F, H*e.ctx)
		for h := 0; h < H; h++ {
			a := att[h*e.ctx : (h+1)*e.ctx]
			if faults["one buffer for all heads"] {
				a = att[:e.ctx]
			}
			for t := 0; t < seen; t++ {
				at := e.keyAt(l, h, t, hs, true)
				a[t] = dot(qkv[3*i*C+h*hs:3*i*C+(h+1)*hs], e.keys[at:at+hs])
				if !faults["unscaled"] {
					a[t] /= scale
				}
			}
			e.keepRow(label(l, "scores"), h, e.row, e.T, a[:seen])
			if faults["softmax over the buffer"] {
				softmax(a)
			} else {
				softmax(a[:seen])
			}
		}
		for h := 0; h < H; h++ {
			a := att[h*e.ctx : (h+1)*e.ctx]
			if faults["one buffer for all heads"] {
				a = att[:e.ctx]
			}
			e.keepRow(label(l, "att"), h, e.row, e.T, a[:seen])
			for t := 0; t < seen; t++ {
				at := e.valueAt(l, t)
				for c := h * hs; c < (h+1)*hs; c++ {
					e.mixed[i*C+c] += a[t] * e.values[at+c]
				}
			}
			slot := e.past + i
			e.keepRow(label(l, "keys"), h, e.row, hs, e.keys[e.keyAt(l, h, slot, hs, false):][:hs])
		}
	}
	return e.mixed
}

func label(l int, name string) string {
	digits := ""
	for ; l > 9; l /= 10 {
		digits = string(rune('0'+l%10)) + digits
	}
	return string(rune('0'+l)) + digits + " " + name
}

// forward: logits of the new tokens, which follow those in the cache.
func (e *engine[F]) forward(ids []int) {
	C, n, first := e.C, len(ids), e.row
	part := func(name string, l, size int) []F { return e.w[name][l*size : (l+1)*size] }
	keep := func(name string, width int, values []F) {
		for i := 0; i < n; i++ {
			e.row = first + i
			e.keep(name, width, values[i*width:(i+1)*width])
		}
	}
	x := make([]F, n*C)
	for i, id := range ids {
		pos := e.past + i
		if faults["step at position 0"] {
			pos = i
		}
		for c := 0; c < C; c++ {
			x[i*C+c] = e.w["wte"][id*C+c]
			if !faults["no positions"] {
				x[i*C+c] += e.w["wpe"][pos*C+c]
			}
		}
	}
	keep("embedded", C, x)
	start := 0
	if faults["loop from 1"] {
		start = 1
	}
	e.mixed = nil
	for l := start; l < e.L; l++ {
		normed := e.norm(x, part("ln1w", l, C), part("ln1b", l, C))
		keep(label(l, "ln1"), C, normed)
		bias := part("qkvb", l, 3*C)
		if faults["steps without bias"] && n == 1 && e.past > 0 {
			bias = make([]F, 3*C)
		}
		qkv := linear(normed, part("qkvw", l, 3*C*C), bias, C, 3*C)
		keep(label(l, "qkv"), 3*C, qkv)
		mixed := e.attend(l, qkv, n, func(i int) { e.row = first + i })
		keep(label(l, "mixed"), C, mixed)
		projected := linear(mixed, part("projw", l, C*C), part("projb", l, C), C, C)
		keep(label(l, "proj"), C, projected)
		for i := range x {
			x[i] += projected[i]
		}
		keep(label(l, "middle"), C, x)
		normed = e.norm(x, part("ln2w", l, C), part("ln2b", l, C))
		keep(label(l, "ln2"), C, normed)
		bias = part("fcb", l, 4*C)
		if faults["bias of block 0"] {
			bias = part("fcb", 0, 4*C)
		}
		wide := linear(normed, part("fcw", l, 4*C*C), bias, C, 4*C)
		keep(label(l, "wide"), 4*C, wide)
		for i := range wide {
			wide[i] = gelu(wide[i])
		}
		keep(label(l, "active"), 4*C, wide)
		bias = part("fcprojb", l, C)
		if faults["last bias forgotten"] {
			bias = make([]F, C)
		}
		fed := linear(wide, part("fcprojw", l, 4*C*C), bias, 4*C, C)
		keep(label(l, "fed"), C, fed)
		for i := range x {
			if faults["feed-forward replaces"] {
				x[i] = 0
			}
			x[i] += fed[i]
		}
		keep(label(l, "result"), C, x)
	}
	last := e.norm(x, e.w["lnfw"], e.w["lnfb"])
	keep("last", C, last)
	logits := linear(last, e.w["wte"], nil, C, e.V)
	for i := range logits {
		if faults["logits over root"] {
			logits[i] /= F(math.Sqrt(float64(C)))
		}
	}
	keep("logits", e.V, logits)
	e.past += n
	e.row = first + n
	if faults["first step a slot late"] && n > 1 {
		e.past++
	}
}

// quantise: eight bits; a scale for 32 numbers that follow each other, or for a row.
func quantise[F real](w []F, in, out int) {
	group := 32
	if faults["scales by column"] {
		group = in
	}
	scales := make([]float64, 0)
	for row := 0; row < len(w); row += in {
		for from := row; from < row+in; from += group {
			to, largest := from+group, 0.0
			if to > row+in {
				to = row + in
			}
			for _, v := range w[from:to] {
				largest = math.Max(largest, math.Abs(float64(v)))
			}
			scales = append(scales, largest/127)
			for i := from; i < to; i++ {
				w[i] = F(math.Round(float64(w[i]) / scales[len(scales)-1]))
				if !faults["scales by column"] {
					w[i] *= F(scales[len(scales)-1])
				}
			}
		}
	}
	for i := range w {
		if faults["scales by column"] {
			w[i] *= F(scales[i/(in*out)*out+i%in%out])
		}
	}
}

func (e *engine[F]) load(kinds map[string][]float32) {
	C := e.C
	e.w = map[string][]F{}
	sizes := map[string][2]int{"qkvw": {C, 3 * C}, "projw": {C, C}, "fcw": {C, 4 * C}, "fcprojw": {4 * C, C}}
	for name, array := range kinds {
		e.w[name] = make([]F, len(array))
		in, out := sizes[name][0], sizes[name][1]
		for i, v := range array {
			at := i
			if in > 0 && !(faults["feeds not turned"] && name[:2] == "fc") { // from [in][out] to [out][in]
				block, rest := i/(in*out), i%(in*out)
				at = block*in*out + rest%out*in + rest/out
			}
			e.w[name][at] = F(v)
		}
		if in > 0 && (faults["int8"] || faults["scales by column"]) {
			quantise(e.w[name], in, out)
		}
	}
	e.ctx = len(kinds["wpe"]) / C
	e.keys, e.values = make([]F, e.L*e.ctx*C), make([]F, e.L*e.ctx*C)
	e.seen = map[string]*record{}
}

func serve[F real](sizes []int, ids []int, kinds map[string][]float32) []byte {
	e := &engine[F]{B: sizes[0], T: sizes[1], C: sizes[2], H: sizes[3], L: sizes[4], V: sizes[5]}
	if faults["heads of another size"] {
		e.H *= 2
	}
	e.load(kinds)
	e.prompt = e.T / 2
	if faults["(token by token)"] {
		e.prompt = 1
	}
	for e.sequence = 0; e.sequence < e.B; e.sequence++ {
		if e.row = 0; !faults["cache not cleared"] {
			e.past = 0
		}
		row := ids[e.sequence*e.T : (e.sequence+1)*e.T]
		e.forward(row[:e.prompt])
		for t := e.prompt; t < e.T; t++ {
			e.forward(row[t : t+1])
		}
	}
	out := []byte{}
	for _, name := range e.order {
		out = binary.BigEndian.AppendUint16(out, uint16(len(name)))
		out = append(out, name...)
		out = binary.BigEndian.AppendUint32(out, uint32(len(e.seen[name].shape)))
		for _, size := range e.seen[name].shape {
			out = binary.BigEndian.AppendUint32(out, uint32(size))
		}
		for _, v := range e.seen[name].data {
			out = binary.BigEndian.AppendUint64(out, math.Float64bits(v))
		}
	}
	return out
}

func main() {
	given, err := os.ReadFile(os.Args[1])
	if err != nil {
		panic(err)
	}
	number := func() int {
		v := int(binary.BigEndian.Uint32(given))
		given = given[4:]
		return v
	}
	sizes, ids := make([]int, 7), []int{}
	for i := range sizes {
		sizes[i] = number()
	}
	for i := 0; i < sizes[0]*sizes[1]; i++ {
		ids = append(ids, number())
	}
	kinds := map[string][]float32{}
	for i := 0; i < sizes[6]; i++ {
		length := int(binary.BigEndian.Uint16(given))
		name := string(given[2 : 2+length])
		given = given[2+length:]
		array := make([]float32, number())
		for j := range array {
			array[j] = math.Float32frombits(uint32(number()))
		}
		kinds[name] = array
	}
	for _, name := range strings.Split(os.Args[3], ";") {
		faults[name] = true
	}
	out := []byte{}
	if os.Args[4] == "float32" {
		out = serve[float32](sizes, ids, kinds)
	} else {
		out = serve[float64](sizes, ids, kinds)
	}
	if err := os.WriteFile(os.Args[2], out, 0o644); err != nil {
		panic(err)
	}
}
