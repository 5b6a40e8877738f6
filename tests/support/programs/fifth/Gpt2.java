import java.io.*;
import java.util.*;

/** GPT-2 over flat buffers and offsets, batch first, parameters stacked by kind: java Gpt2 IN OUT 'fault;fault' single|double */
public final class Gpt2 {
    static final Map<String, double[]> W = new HashMap<>();
    static Set<String> faults;
    static boolean single;
    static int B, T, C, H, L, V;
    static DataOutputStream out;

    static boolean bad(String fault) { return faults.contains(fault); }

    static double r(double x) { return single ? (float) x : x; }

    static void keep(String name, double[] data, int... shape) throws IOException {
        out.writeUTF(name);
        out.writeInt(shape.length);
        for (int size : shape) out.writeInt(size);
        for (double x : data) out.writeDouble(x);
    }

    /** Turns each [rows, cols] of a stack to [cols, rows], as matmul reads them. */
    static void turn(String kind, int rows, int cols) {
        double[] old = W.get(kind), turned = new double[old.length];
        for (int i = 0; i < old.length; i++) {
            int l = i / (rows * cols), row = i / cols % rows, col = i % cols;
            turned[l * rows * cols + col * rows + row] = old[i];
        }
        W.put(kind, turned);
    }

    static double shortened(double x, double[] group) {
        if (bad("bfloat16 cut off")) return Float.intBitsToFloat(Float.floatToIntBits((float) x) & 0xffff0000);
        double most = 0;
        for (double y : group) if (Math.abs(y) > Math.abs(most)) most = y;
        double step = most / -8;
        return step == 0 ? 0 : step * Math.max(-8, Math.min(7, Math.rint(x / step)));
    }

    static void load(DataInputStream in, int kinds) throws IOException {
        for (int i = 0; i < kinds; i++) {
            String name = in.readUTF();
            double[] data = new double[in.readInt()];
            for (int j = 0; j < data.length; j++) data[j] = in.readFloat();
            W.put(name, data);
        }
        if (!bad("qkv as it lies")) turn("qkvw", C, 3 * C);
        if (!bad("square not turned")) turn("projw", C, C);
        turn("fcw", C, 4 * C);
        turn("fcprojw", 4 * C, C);
        if (bad("bfloat16 cut off") || bad("four bits"))
            for (String kind : List.of("qkvw", "projw", "fcw", "fcprojw")) {
                double[] data = W.get(kind), old = data.clone();
                int group = 4;
                while (C % (2 * group) == 0 && group < 32) group *= 2;
                for (int j = 0; j < data.length; j++)
                    data[j] = shortened(old[j], Arrays.copyOfRange(old, j / group * group, j / group * group + group));
            }
        if (bad("last projection unread")) Arrays.fill(W.get("projw"), (L - 1) * C * C, L * C * C, 0);
        if (bad("feeds exchanged")) {
            double[] w = W.get("fcw"), old = w.clone();
            System.arraycopy(old, 4 * C * C, w, 0, 4 * C * C);
            System.arraycopy(old, 0, w, 4 * C * C, 4 * C * C);
        }
    }

    static double[] layernorm(double[] x, String kind, int l, double[] means, double[] rstds) {
        double[] g = W.get(kind + "w"), b = W.get(kind + "b"), y = new double[x.length];
        for (int row = 0; row < B * T; row++) {
            double mean = 0, var = 0;
            for (int i = 0; i < C; i++) mean = r(mean + x[row * C + i]);
            mean = bad("mean by 1 / C") ? 1 / C * mean : r(mean / C);
            for (int i = 0; i < C; i++) var = r(var + Math.pow(x[row * C + i] - mean, 2));
            double rstd = r(1 / Math.sqrt(var / C + (bad("eps 1e-12") ? 1e-12 : 1e-5)));
            for (int i = 0; i < C; i++) y[row * C + i] = r(r((x[row * C + i] - mean) * rstd) * g[l * C + i] + b[l * C + i]);
            means[row] = mean;
            rstds[row] = rstd;
        }
        if (bad("norm in place") && l < L && !kind.equals("lnf")) System.arraycopy(y, 0, x, 0, x.length);
        return y;
    }

    static double[] matmul(double[] x, double[] w, int wAt, double[] bias, int bAt, int in, int outs) {
        double[] y = new double[B * T * outs];
        for (int i = 0; i < y.length; i++) {
            double sum = bias == null ? 0 : bias[bAt + i % outs];
            for (int j = 0; j < in; j++) sum = r(sum + x[i / outs * in + j] * w[wAt + i % outs * in + j]);
            y[i] = sum;
        }
        return y;
    }

    static double[] attention(double[] qkv, double[] pre, double[] att) {
        int heads = bad("one head") ? 1 : H, hs = C / heads;
        double[] y = new double[B * T * C];
        double scale = 1 / (bad("root as int") ? (int) Math.sqrt(hs) : Math.sqrt(hs));
        if (bad("unscaled")) scale = 1;
        if (bad("scale multiplied")) scale = Math.sqrt(hs);
        for (int at = 0; at < B * heads * T; at++) {
            int b = at / (heads * T), h = at / T % heads, t = at % T, keyRow = bad("keys of the first sentence") ? 0 : b;
            boolean thirds = bad("thirds within heads");
            int q = thirds ? h * 3 * hs : h * hs;
            int k = thirds ? q + hs : (bad("keys of head 0") ? 0 : h * hs) + (bad("keys without offset") ? 0 : C);
            int v = thirds ? q + 2 * hs : h * hs + (bad("values at C") ? C : 2 * C);
            boolean all = bad("hidden is MIN_VALUE") || bad("masked behind softmax");
            int end = all ? T : bad("t2 < t") ? t : bad("t2 <= t + 1") ? Math.min(T, t + 2) : t + 1;
            double most = -1e30, total = 0;
            for (int s = 0; s < end; s++) {
                double sum = 0;
                int from = (b * T + t) * 3 * C + q, with = (keyRow * T + s) * 3 * C + k;
                for (int i = 0; i < hs; i++) sum = r(sum + qkv[from + i] * qkv[with + i]);
                sum = bad("hidden is MIN_VALUE") && s > t ? Double.MIN_VALUE : r(sum * scale);
                pre[at * T + s] = sum;
                most = Math.max(most, sum);
            }
            for (int s = 0; s < end; s++) total = r(total + (att[at * T + s] = r(Math.exp(pre[at * T + s] - most))));
            for (int s = 0; s < end; s++) {
                att[at * T + s] = bad("masked behind softmax") && s > t ? 0 : r(att[at * T + s] / total);
                for (int i = 0; i < hs; i++) {
                    int to = bad("written by head") ? at * hs + i : (b * T + t) * C + h * hs + i;
                    y[to] = r(y[to] + att[at * T + s] * qkv[(b * T + s) * 3 * C + v + i]);
                }
            }
        }
        return y;
    }

    static double gelu(double x) {
        if (bad("half as int")) return 1 / 2 * x;
        double root = bad("root of pi alone") ? 1 / Math.sqrt(Math.PI) : Math.sqrt(2 / Math.PI);
        return r(0.5 * x * (1 + Math.tanh(root * (x + 0.044715 * x * x * x))));
    }

    static double[] add(double[] a, double[] b) {
        double[] y = new double[a.length];
        for (int i = 0; i < y.length; i++) y[i] = r(a[i] + b[i]);
        return y;
    }

    static void forward(int[] ids) throws IOException {
        double[] wte = W.get("wte"), wpe = W.get("wpe"), x = new double[B * T * C];
        for (int i = 0; i < x.length; i++) {
            int t = bad("row for position") ? i / (T * C) : i / C % T;
            x[i] = r(wte[ids[i / C] * C + i % C] + wpe[t * C + i % C]);
        }
        keep("encoded", x, B, T, C);
        for (int l = 0; l < (bad("loop ends early") ? L - 1 : L); l++) {
            double[] means = new double[B * T], rstds = new double[B * T], residual = x;
            double[] ln1 = layernorm(x, bad("second norm's slot") ? "ln2" : "ln1", l, means, rstds);
            keep(l + " rstd", rstds, B, T);
            int biasAt = bad("bias stride C") ? l * C : l * 3 * C;
            double[] qkv = matmul(ln1, W.get("qkvw"), l * 3 * C * C, W.get("qkvb"), biasAt, C, 3 * C);
            int heads = bad("one head") ? 1 : H;
            double[] pre = new double[B * heads * T * T], att = new double[pre.length];
            double[] atty = attention(qkv, pre, att);
            double[] projb = bad("bias of projection unused") ? null : W.get("projb");
            double[] proj = matmul(atty, W.get("projw"), l * C * C, projb, l * C, C, C);
            if (bad("not projected")) proj = atty;
            double[] middle = add(residual, proj);
            double[] ln2 = layernorm(middle, "ln2", l, means, rstds);
            int feedAt = bad("feed stride C C") ? l * C * C : l * 4 * C * C;
            double[] fch = matmul(ln2, W.get("fcw"), feedAt, W.get("fcb"), l * 4 * C, C, 4 * C);
            double[] active = new double[fch.length];
            for (int i = 0; i < fch.length; i++) active[i] = bad("gelu twice") ? gelu(gelu(fch[i])) : gelu(fch[i]);
            double[] fed = matmul(active, W.get("fcprojw"), l * 4 * C * C, W.get("fcprojb"), l * C, 4 * C, C);
            x = add(bad("first residual again") ? residual : middle, fed);
            keep(l + " preatt", pre, B, heads, T, T);
            keep(l + " att", att, B, heads, T, T);
            Map<String, double[]> rows = Map.of("ln1", ln1, "qkv", qkv, "atty", atty, "proj", proj, "middle", middle, "ln2", ln2,
                "fch", fch, "active", active, "fed", fed, "result", x);
            for (var e : new TreeMap<>(rows).entrySet())
                keep(l + " " + e.getKey(), e.getValue(), B, T, e.getValue().length / (B * T));
        }
        double[] last = layernorm(x, "lnf", 0, new double[B * T], new double[B * T]);
        keep("last", last, B, T, C);
        double[] logits = matmul(last, wte, 0, null, 0, C, V);
        if (bad("temperature 0.8")) for (int i = 0; i < logits.length; i++) logits[i] = r(logits[i] / 0.8);
        keep("logits", logits, B, T, V);
    }

    public static void main(String[] given) throws IOException {
        faults = new HashSet<>(Arrays.asList(given[2].split(";")));
        single = given[3].equals("single");
        try (DataInputStream in = new DataInputStream(new BufferedInputStream(new FileInputStream(given[0])))) {
            out = new DataOutputStream(new BufferedOutputStream(new FileOutputStream(given[1])));
            int[] sizes = new int[7];
            for (int i = 0; i < 7; i++) sizes[i] = in.readInt();
            B = sizes[0]; T = sizes[1]; C = sizes[2]; H = sizes[3]; L = sizes[4]; V = sizes[5];
            int[] ids = new int[B * T];
            for (int i = 0; i < ids.length; i++) ids[i] = in.readInt();
            load(in, sizes[6]);
            forward(ids);
            out.close();
        }
    }
}
