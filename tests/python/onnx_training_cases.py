"""Attention with its backward in ONNX's text, as producers of training graphs write it: what must fuse, and what must not.

Inputs are q [B, 4, S, 8], k and v [B, 4, T, 8], g (the gradient of `out`), masks; outputs `out` and those of dq, dk, dv, db
that there are.
"""

import numpy as np

B, H, S, T, D = 2, 4, 5, 6, 8
INPUTS = {
    "q": (B, H, S, D),
    "k": (B, H, T, D),
    "v": (B, H, T, D),
    "g": (B, H, S, D),
    "x": (B, S, H * D),
    "y": (B, T, H * D),
    "gx": (B, S, H * D),
    "gk": (B, 2, T, D),  # key and value with two heads
    "qs": (B, H, T, D),  # as many queries as keys
    "gs": (B, H, T, D),
    "bias": (B, 1, S, T),
    "table": (H, S, T),
    "places": (S, T),
    "full": (B, H, S, T),
    "keep": (B, 1, S, T),
    "sinks": (H,),
    "factor": (H, 1, 1),
}

NUMBERS = """
  c = Constant<value = float {0.35355339}>() d = Constant<value = float {2.82842712}>() zero = Constant<value = float {0.0}>()
  inf = Constant<value = float {-inf}>() one = Constant<value = float {1.0}>() last = Constant<value = int64[1] {-1}>()
  half = Constant<value = float {0.25}>() yes = Constant<value = bool {1}>() lowest = Constant<value = float {-1e9}>()
"""
T_ = "Transpose<perm = [0, 1, 3, 2]>"
SCORES = f"kt = {T_}(k) m = MatMul(q, kt) s = Mul(m, c)"
SOFTMAX = "w = Softmax<axis = -1>(s) out = MatMul(w, v)"
FORWARD = f"{SCORES} {SOFTMAX}"
DP = f"vt = {T_}(v) dp = MatMul(g, vt)"
DV = f"wt = {T_}(w) dv = MatMul(wt, g)"
DS = "e = Mul(dp, w) r = ReduceSum<keepdims = 1>(e, last) f = Mul(w, r) ds = Sub(e, f)"
DQ_DK = f"dm = Mul(ds, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)"
PLAIN = f"{FORWARD} {DP} {DV} {DS} {DQ_DK}"

# torch by make_fx: batch and heads are one dim of the products.
THREE = """
  n4 = Constant<value = int64[4] {2, 5, 4, 8}>() o4 = Constant<value = int64[4] {2, 6, 4, 8}>()
  p3 = Constant<value = int64[3] {8, 5, 8}>() k3 = Constant<value = int64[3] {8, 8, 6}>() v3 = Constant<value = int64[3] {8, 6, 8}>()
  s4 = Constant<value = int64[4] {2, 4, 5, 6}>() s3 = Constant<value = int64[3] {8, 5, 6}>()
  q4 = Constant<value = int64[4] {2, 4, 5, 8}>() t4 = Constant<value = int64[4] {2, 4, 6, 8}>() u4 = Constant<value = int64[4] {2, 4, 8, 6}>()
  flat = Constant<value = int64[2] {10, 32}>() flatk = Constant<value = int64[2] {12, 32}>() whole = Constant<value = int64[3] {2, 5, 32}>()
  a = Reshape(x, n4) ah = Transpose<perm = [0, 2, 1, 3]>(a) b = Reshape(y, o4) bh = Transpose<perm = [0, 2, 3, 1]>(b)
  z = Neg(y) h = Reshape(z, o4) hh = Transpose<perm = [0, 2, 1, 3]>(h)
"""
TORCH = f"""{THREE} a3 = Reshape(ah, p3) b3 = Reshape(bh, k3) h3 = Reshape(hh, v3) m3 = MatMul(a3, b3) m = Reshape(m3, s4)
  s = Div(m, d) w = Softmax<axis = -1>(s) w3 = Reshape(w, s3) x3 = MatMul(w3, h3) x4 = Reshape(x3, q4)
  xt = Transpose<perm = [0, 2, 1, 3]>(x4) out = Reshape(xt, whole)
  g4 = Reshape(gx, n4) gh = Transpose<perm = [0, 2, 1, 3]>(g4) g3 = Reshape(gh, p3)
  w3t = Transpose<perm = [0, 2, 1]>(w3) dv3 = MatMul(w3t, g3) h3t = Transpose<perm = [0, 2, 1]>(h3) dp3 = MatMul(g3, h3t)
  dv4 = Reshape(dv3, t4) dp = Reshape(dp3, s4) {DS} dm = Div(ds, d) dm3 = Reshape(dm, s3)
  a3t = Transpose<perm = [0, 2, 1]>(a3) dk3 = MatMul(a3t, dm3) b3t = Transpose<perm = [0, 2, 1]>(b3) dq3 = MatMul(dm3, b3t)
  dk4 = Reshape(dk3, u4) dq4 = Reshape(dq3, q4) dvt = Transpose<perm = [0, 2, 1, 3]>(dv4) dv = Reshape(dvt, flatk)
  dkt = Transpose<perm = [0, 3, 1, 2]>(dk4) dk = Reshape(dkt, flatk) dqt = Transpose<perm = [0, 2, 1, 3]>(dq4) dq = Reshape(dqt, flat)
"""
# JAX: the softmax in parts, and the gradient of its quotient.
PARTS = """top = ReduceMax<keepdims = 0>(s, last) least = Max(inf, top) topu = Unsqueeze(least, last) rest = Sub(s, topu) ex = Exp(rest)
  sum = ReduceSum<keepdims = 0>(ex, last) zu = Unsqueeze(sum, last) w = Div(ex, zu)"""
JAX = f"""{SCORES} {PARTS} out = MatMul(w, v) minus = Constant<value = float {{-2.0}}>() {DV}
  dp = Einsum<equation = "bhqd,bhkd->bhqk">(g, v) zz = Pow(zu, minus) gz = Mul(dp, zz) ge = Mul(gz, ex)
  gr = ReduceSum<keepdims = 0>(ge, last) gn = Neg(gr) gu = Unsqueeze(gn, last) n = Constant<value = int64[4] {{2, 4, 5, 6}}>() gf = Expand(gu, n) gq = Div(dp, zu) gs2 = Sum(gq, gf) ds = Mul(gs2, ex)
  dm = Mul(ds, c) dq = Einsum<equation = "bhqk,bhkd->bhqd">(dm, k) dk = Einsum<equation = "bhqk,bhqd->bhkd">(dm, q)
"""
MASKED = "keeps = Where(keep, m, inf) s = Mul(keeps, c)"

# A logit of each head beside the scores, behind or ahead of them, and the gradient of what is joined.
SINKS = """
  f4 = Constant<value = int64[4] {1, 4, 1, 1}>() own = Reshape(sinks, f4) e4 = Constant<value = int64[4] {2, 4, 5, 1}>() sink = Expand(own, e4)
  i0 = Constant<value = int64[1] {0}>() i1 = Constant<value = int64[1] {1}>() i3 = Constant<value = int64[1] {3}>() i6 = Constant<value = int64[1] {6}>()
  i7 = Constant<value = int64[1] {7}>() rows = Constant<value = int64[2] {0, 2}>()
"""
BEHIND = f"{SINKS} {SCORES} j = Concat<axis = -1>(s, sink) z = Softmax<axis = -1>(j) w = Slice(z, i0, i6, i3) out = MatMul(w, v) {DP} {DV}"
DJ = "e = Mul(dz, z) r = ReduceSum<keepdims = 1>(e, last) f = Mul(z, r) dj = Sub(e, f)"
CUT = f"ds = Slice(dj, i0, i6, i3) dsink = Slice(dj, i6, i7, i3) db = ReduceSum<keepdims = 1>(dsink, rows) {DQ_DK}"
PADDED = "pads = Constant<value = int64[8] {0, 0, 0, 0, 0, 0, 0, 1}>() dz = Pad(dp, pads)"
SCATTERED = """turned = Transpose<perm = [3, 1, 2, 0]>(dp) empty = Constant<value = int64[4] {7, 4, 5, 2}>() none = Expand(zero, empty)
  places = Constant<value = int64[6,1] {0, 1, 2, 3, 4, 5}>() put = ScatterND(none, places, turned) dz = Transpose<perm = [3, 1, 2, 0]>(put)"""
B0 = "b0 = Constant<value = int64[1] {0}>()"
QK = f"{B0} kt = {T_}(k) m = MatMul(q, kt)"
DROWS = "rows = Constant<value = int64[3] {0, 2, 3}>()"
BACK = f"dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)"
CAPPED = f"{QK} m1 = Mul(m, c) u = Add(m1, table) t = Tanh(u) s = Mul(t, d) {SOFTMAX} {DP} {DV} {DS} ds1 = Mul(ds, d) t2 = Mul(t, t) t3 = Sub(one, t2) du = Mul(ds1, t3) db = ReduceSum<keepdims = 0>(du, b0) dm = Mul(du, c) {BACK}"
BY_HEADS = f"{QK} {DROWS} s = Mul(m, factor) {SOFTMAX} {DP} {DV} {DS} dm = Mul(ds, factor) df = Mul(ds, m) db = ReduceSum<keepdims = 1>(df, rows) {BACK}"

# name: nodes; what fuses becomes one Attention and one AttentionGrad
TRAINING = {
    "torch": TORCH,
    "plain": PLAIN,
    "jax": JAX,
    "tensorflow": f"""{FORWARD} {DP} {DV} e = Mul(dp, w) r = ReduceSum<keepdims = 1>(e, last) f = Sub(dp, r) cw = Mul(c, w) dm = Mul(f, cw)
        dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)""",
    "onnxruntime": f"""{SCORES} {SOFTMAX} dv = com.microsoft.FusedMatMul<transA = 1>(w, g) dp = com.microsoft.FusedMatMul<transB = 1>(g, v)
        ds = com.microsoft.SoftmaxGrad_13<axis = -1>(dp, w) dm = Div(ds, d) dq = com.microsoft.FusedMatMul<transB = 1>(dm, kt)
        dkt = com.microsoft.FusedMatMul<transA = 1>(q, dm) dk = {T_}(dkt)""",
    "scale_on_both": f"""rt = Sqrt(c) qr = Mul(q, rt) kt = {T_}(k) kr = Mul(kt, rt) s = MatMul(qr, kr) {SOFTMAX} {DP} {DV} {DS}
        krt = {T_}(kr) dqr = MatMul(ds, krt) dq = Mul(dqr, rt) qrt = {T_}(qr) dkr = MatMul(qrt, ds) dkt = Mul(dkr, rt) dk = {T_}(dkt)""",
    "scale_in_one_product": f"""{SCORES} {SOFTMAX} {DP} {DV} {DS} dq0 = MatMul(ds, k) dq = Mul(dq0, c) dst = {T_}(ds) dk0 = MatMul(dst, q) dk = Mul(dk0, c)""",
    "log_softmax": f"{SCORES} l = LogSoftmax<axis = -1>(s) w = Exp(l) out = MatMul(w, v) {DP} {DV} e = Mul(dp, w) r = ReduceSum<keepdims = 1>(e, last) f = Mul(w, r) ds = Sub(e, f) {DQ_DK}",
    "mask_chosen": f"kt = {T_}(k) m = MatMul(q, kt) {MASKED} {SOFTMAX} {DP} {DV} {DS} dz = Mul(ds, c) dm = Where(keep, dz, zero) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)",
    "mask_hidden": f"kt = {T_}(k) m = MatMul(q, kt) hide = Not(keep) h = Where(hide, inf, m) s = Mul(h, c) {SOFTMAX} {DP} {DV} {DS} dz = Where(hide, zero, ds) dm = Mul(dz, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)",
    "mask_told_twice": f"kt = {T_}(k) m = MatMul(q, kt) h1 = Not(keep) h = Where(h1, inf, m) s = Mul(h, c) {SOFTMAX} {DP} {DV} {DS} h2 = Not(keep) dz = Where(h2, zero, ds) dm = Mul(dz, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)",
    "mask_added": f"kt = {T_}(k) m0 = MatMul(q, kt) m1 = Mul(m0, c) s = Add(m1, bias) {SOFTMAX} {DP} {DV} {DS} {DQ_DK}",
    "guard": f"""kt = {T_}(k) m = MatMul(q, kt) {MASKED} p = Softmax<axis = -1>(s) nan = IsNaN(p) w = Where(nan, zero, p) out = MatMul(w, v)
        {DP} {DV} {DS} dz = Mul(ds, c) dm = Where(keep, dz, zero) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)""",
    "softcap": f"""kt = {T_}(k) m0 = MatMul(q, kt) m = Mul(m0, c) a = Div(m, d) t = Tanh(a) s = Mul(t, d) {SOFTMAX} {DP} {DV} {DS}
        ds1 = Mul(ds, d) t2 = Mul(t, t) t3 = Sub(one, t2) ds2 = Mul(ds1, t3) ds3 = Div(ds2, d) dm = Mul(ds3, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)""",
    "bias_of_heads": f"b0 = Constant<value = int64[1] {{0}}>() kt = {T_}(k) m0 = MatMul(q, kt) m1 = Mul(m0, c) s = Add(m1, table) {SOFTMAX} {DP} {DV} {DS} db = ReduceSum<keepdims = 0>(ds, b0) {DQ_DK}",
    "bias_kept_dims": f"b0 = Constant<value = int64[2] {{0, 1}}>() kt = {T_}(k) m0 = MatMul(q, kt) m1 = Mul(m0, c) s = Add(m1, places) {SOFTMAX} {DP} {DV} {DS} db = ReduceSum<keepdims = 1>(ds, b0) {DQ_DK}",
    "bias_of_all": f"kt = {T_}(k) m0 = MatMul(q, kt) m1 = Mul(m0, c) s = Add(m1, full) {SOFTMAX} {DP} {DV} {DS} db = Identity(ds) {DQ_DK}",
    "repeated_heads": f"""i = Constant<value = int64[1] {{2}}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {{1, 1, 2, 1, 1}}>() ex = Expand(u, n)
        zs = Constant<value = int64[4] {{0, 4, -1, 8}}>() k1 = Reshape(ex, zs) kt = {T_}(k1) m = MatMul(q, kt) s = Mul(m, c) w = Softmax<axis = -1>(s) out = MatMul(w, k1)
        vt = {T_}(k1) dp = MatMul(g, vt) {DV} {DS} dm = Mul(ds, c) dq = MatMul(dm, k1) dmt = {T_}(dm) dkr = MatMul(dmt, q)
        rs = Constant<value = int64[5] {{2, 2, 2, 6, 8}}>() dkr5 = Reshape(dkr, rs) dk5 = ReduceSum<keepdims = 1>(dkr5, i) dk = Squeeze(dk5, i)
        dv5 = Reshape(dvr, rs) dv = ReduceSum<keepdims = 0>(dv5, i)""".replace("dv = MatMul(wt, g)", "dvr = MatMul(wt, g)"),
    "gradients_of_each_repeat": f"""i = Constant<value = int64[1] {{2}}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {{1, 1, 2, 1, 1}}>() ex = Expand(u, n)
        zs = Constant<value = int64[4] {{0, 4, -1, 8}}>() k1 = Reshape(ex, zs) kt = {T_}(k1) m = MatMul(q, kt) s = Mul(m, c) w = Softmax<axis = -1>(s) out = MatMul(w, k1)
        vt = {T_}(k1) dp = MatMul(g, vt) {DV} {DS} dm = Mul(ds, c) dq = MatMul(dm, k1) dmt = {T_}(dm) dk = MatMul(dmt, q)""",
    "sinks": f"{BEHIND} {PADDED} {DJ} {CUT}",
    "sinks_joined_with_zeros": f"{BEHIND} nothing = Expand(zero, e4) dz = Concat<axis = 3>(dp, nothing) {DJ} {CUT}",
    "sinks_scattered": f"{BEHIND} {SCATTERED} {DJ} {CUT}",
    "sinks_ahead": f"""{SINKS} {SCORES} j = Concat<axis = -1>(sink, s) z = Softmax<axis = -1>(j) w = Slice(z, i1, i7, i3) out = MatMul(w, v) {DP} {DV}
        pads = Constant<value = int64[8] {{0, 0, 0, 1, 0, 0, 0, 0}}>() dz = Pad(dp, pads) {DJ} ds = Slice(dj, i1, i7, i3) dsink = Slice(dj, i0, i1, i3)
        db = ReduceSum<keepdims = 0>(dsink, rows) {DQ_DK}""",
    "sinks_less_the_maximum": f"""{BEHIND.replace("z = Softmax<axis = -1>(j)", "top = ReduceMax<keepdims = 1>(j, last) at = ArgMax<axis = -1>(j) less = Sub(j, top) z = Softmax<axis = -1>(less)")} {PADDED} {DJ.replace("dj =", "dl =")}
        minus = Neg(dl) dtop = ReduceSum<keepdims = 1>(minus, last) e7 = Constant<value = int64[4] {{2, 4, 5, 7}}>() none = Expand(zero, e7)
        scattered = ScatterElements<axis = -1>(none, at, dtop) dj = Add(dl, scattered) {CUT}""",
    "sinks_and_a_mask": f"""{BEHIND.replace("s = Mul(m, c)", MASKED)} {PADDED} {DJ} {CUT.replace("ds =", "ds0 =").replace("dm = Mul", "ds = Where(keep, ds0, zero) dm = Mul", 1)}""",
    "sinks_without_a_gradient": f"{BEHIND} {PADDED} {DJ} ds = Slice(dj, i0, i6, i3) {DQ_DK}",
    "bias_beside_a_mask": f"b0 = Constant<value = int64[1] {{0}}>() kt = {T_}(k) m0 = MatMul(q, kt) m1 = Where(keep, m0, inf) m2 = Mul(m1, c) s = Add(m2, table) {SOFTMAX} {DP} {DV} {DS} db = ReduceSum<keepdims = 0>(ds, b0) dz = Where(keep, ds, zero) dm = Mul(dz, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)",
    "biases_of_two_kinds": f"{QK} m1 = Mul(m, c) m2 = Add(m1, table) s = Add(m2, bias) {SOFTMAX} {DP} {DV} {DS} db = ReduceSum<keepdims = 0>(ds, b0) {DQ_DK}",
    "bias_in_a_softcap": CAPPED,
    "bias_by_a_number": f"{QK} m1 = Add(m, table) s = Mul(m1, c) {SOFTMAX} {DP} {DV} {DS} dm = Mul(ds, c) db = ReduceSum<keepdims = 0>(dm, b0) {BACK}",
    "factor_of_heads": BY_HEADS,
    "factor_of_places": f"{QK} m1 = Mul(m, c) s = Mul(m1, places) {SOFTMAX} {DP} {DV} {DS} b01 = Constant<value = int64[2] {{0, 1}}>() df = Mul(m1, ds) db = ReduceSum<keepdims = 0>(df, b01) dz = Mul(places, ds) dm = Mul(dz, c) {BACK}",
    "scores_squared": f"{QK} two = Constant<value = float {{2.0}}>() m1 = Mul(m, c) s = Pow(m1, two) {SOFTMAX} {DP} {DV} {DS} m2 = Mul(m1, two) dz = Mul(ds, m2) dm = Mul(dz, c) {BACK}",
    "scores_in_bounds": f"{QK} low = Constant<value = float {{-0.5}}>() m1 = Mul(m, c) s = Clip(m1, low, one) {SOFTMAX} {DP} {DV} {DS} above = GreaterOrEqual(m1, low) below = LessOrEqual(m1, one) inside = And(above, below) dz = Where(inside, ds, zero) dm = Mul(dz, c) {BACK}",
    "softcap_and_a_mask_chosen": f"""{QK} m1 = Mul(m, c) a = Div(m1, d) t = Tanh(a) u = Mul(t, d) s = Where(keep, u, inf) {SOFTMAX} {DP} {DV} {DS} dz = Where(keep, ds, zero)
        ds1 = Mul(dz, d) t2 = Mul(t, t) t3 = Sub(one, t2) ds2 = Mul(ds1, t3) ds3 = Div(ds2, d) dm = Mul(ds3, c) {BACK}""",
    "query_alone": f"{FORWARD} {DP} {DS} dm = Mul(ds, c) dq = MatMul(dm, k)",
    "key_is_value": f"kt = {T_}(k) m = MatMul(q, kt) s = Mul(m, c) w = Softmax<axis = -1>(s) out = MatMul(w, k) dp = MatMul(g, kt) {DV} {DS} {DQ_DK}",
}  # fmt: skip

# name: nodes and words of the reason; neither half changes
NEAR_MISSES = {
    "weights_read": (f"{PLAIN} other = Relu(w)", '"w", of "w" (Softmax), is also read by "other" (Relu)'),
    "weights_returned": (f"{PLAIN.replace('w = S', 'other = S').replace('(w,', '(other,').replace(' w)', ' other)').replace('(w)', '(other)')}", "is an output of the graph"),
    "gradient_read": (f"{PLAIN} other = Relu(ds)", '"ds", of "ds" (Sub), is also read by "other" (Relu)'),
    "scale_differs": (f"{FORWARD} {DP} {DV} {DS} {DQ_DK.replace('Mul(ds, c)', 'Mul(ds, half)')}", '"dq", for the gradient of the query, is 0.707107 times'),
    "scale_is_zero": (f"{FORWARD} {DP} {DV} {DS} {DQ_DK.replace('Mul(ds, c)', 'Mul(ds, zero)')}", '"dq" (MatMul) multiplies what is no gradient of these scores'),
    "scale_of_key_differs": (f"{FORWARD} {DP} {DV} {DS} {DQ_DK} ".replace("dk = MatMul(dmt, q)", "two = Constant<value = float {2.0}>() twice = Mul(dmt, two) dk = MatMul(twice, q)"), "for the gradient of the key, is 2 times"),
    "scale_missing": (f"{FORWARD} {DP} {DV} {DS} dq = MatMul(ds, k) dst = {T_}(ds) dk = MatMul(dst, q)", "is 2.82843 times what the forward's scale gives"),
    "transposed_too_often": (f"kt = {T_}(k) m = MatMul(qs, kt) s = Mul(m, c) {SOFTMAX} vt = {T_}(v) dp = MatMul(gs, vt) wt = {T_}(w) dv = MatMul(wt, gs) {DS} dm = Mul(ds, c) dq = MatMul(dm, k) dk = MatMul(dm, qs)", '"dk" (MatMul) multiplies the gradient of the scores with neither'),
    "weights_not_transposed": (f"kt = {T_}(k) m = MatMul(qs, kt) s = Mul(m, c) {SOFTMAX} vt = {T_}(v) dp = MatMul(gs, vt) dv = MatMul(w, gs) {DS} dm = Mul(ds, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, qs)", '"dv" (MatMul) multiplies the weights with what is not the gradient'),
    "other_gradient": (f"{FORWARD} vt = {T_}(v) dp = MatMul(g, vt) o = Neg(g) wt = {T_}(w) dv = MatMul(wt, o) {DS} {DQ_DK}", '"dv" (MatMul) multiplies the weights with what is not the gradient'),
    "gradient_by_the_key": (f"{FORWARD} dp = MatMul(g, kt) {DV} {DS} {DQ_DK}", "their own gradient is not found"),
    "sum_over_queries": (f"{FORWARD} {DP} {DV} {DS.replace('last', 'rows')} {DQ_DK} ".replace("vt =", "rows = Constant<value = int64[1] {2}>() vt ="), '"r" (ReduceSum) is no step from the gradient of the weights'),
    "weights_forgotten": (f"{FORWARD} {DP} {DV} e = Mul(dp, w) r = ReduceSum<keepdims = 1>(e, last) ds = Sub(dp, r) {DQ_DK}", '"dq" (MatMul) multiplies what is no gradient of these scores'),
    "sum_added": (f"{FORWARD} {DP} {DV} {DS.replace('Sub', 'Add')} {DQ_DK}", '"dq" (MatMul) multiplies what is no gradient of these scores'),
    "finite_mask": (f"kt = {T_}(k) m0 = MatMul(q, kt) m = Mul(m0, c) s = Where(keep, m, lowest) {SOFTMAX} {DP} {DV} {DS} dz = Where(keep, ds, zero) dm = Mul(dz, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)", "unseen_rows zero"),
    "other_mask": (f"kt = {T_}(k) m = MatMul(q, kt) {MASKED} {SOFTMAX} {DP} {DV} {DS} n = Not(keep) dz = Where(n, ds, zero) dm = Mul(dz, c) dq = MatMul(dm, k) dmt = {T_}(dm) dk = MatMul(dmt, q)", '"dz" (Where) is no step from the gradient'),
    "bias_summed_otherwise": (f"b0 = Constant<value = int64[2] {{0, 2}}>() kt = {T_}(k) m0 = MatMul(q, kt) m1 = Mul(m0, c) s = Add(m1, table) {SOFTMAX} {DP} {DV} {DS} db = ReduceSum<keepdims = 0>(ds, b0) {DQ_DK}", 'is also read by "db" (ReduceSum)'),
    "sink_of_a_key": (f"{BEHIND} {PADDED} {DJ} {CUT.replace('Slice(dj, i6, i7, i3)', 'Slice(dj, i0, i1, i3)')}", 'is also read by "dsink" (Slice)'),
    "sink_summed_over_heads": (f"{BEHIND} {PADDED} {DJ} {CUT} ".replace("int64[2] {0, 2}", "int64[2] {0, 1}"), 'is also read by "db" (ReduceSum)'),
    "sink_padded_ahead": (f"{BEHIND} {PADDED.replace('0, 0, 0, 0, 0, 0, 0, 1', '0, 0, 0, 1, 0, 0, 0, 0')} {DJ} {CUT}", "their own gradient is not found"),
    "sink_padded_with_ones": (f"{BEHIND} {PADDED.replace('pads)', 'pads, one)')} {DJ} {CUT}", "their own gradient is not found"),
    "sink_scattered_elsewhere": (f"{BEHIND} {SCATTERED.replace('0, 1, 2, 3, 4, 5}', '1, 2, 3, 4, 5, 6}')} {DJ} {CUT}", "their own gradient is not found"),
    "weights_with_sinks_summed": (f"{BEHIND} e = Mul(dp, w) t = ReduceSum<keepdims = 1>(w, last) r = ReduceSum<keepdims = 1>(e, last) rt = Mul(r, t) f = Mul(w, rt) ds = Sub(e, f) {DQ_DK}", '"rt" (Mul) is no step'),
    "slope_forgotten": (CAPPED.replace("du = Mul(ds1, t3)", "du = Identity(ds1) o = Relu(t3)"), "multiplies what is no gradient of these scores"),
    "slope_of_another": (CAPPED.replace("t3 = Sub(one, t2)", "t3 = Add(one, t2)"), "is no step from the gradient of the weights to that of the scores"),
    "slope_beyond_bounds": (f"{QK} high = Constant<value = float {{30.0}}>() m1 = Mul(m, c) s = Min(m1, high) {SOFTMAX} {DP} {DV} {DS} dm = Mul(ds, c) {BACK}", "multiplies what is no gradient of these scores"),
    "factor_by_twice_the_scores": (BY_HEADS.replace("df = Mul(ds, m)", "tw = Add(m, m) df = Mul(ds, tw)"), '"dm" (Mul) is no step'),
    "factor_summed_otherwise": (BY_HEADS.replace("{0, 2, 3}", "{0, 1, 3}"), '"dm" (Mul) is no step'),
    "no_gradient_of_the_scores": (f"{FORWARD} {DP} {DV} {DS} other = Relu(ds)", '"other" (Relu) is no step'),
}  # fmt: skip


def arrays():
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in INPUTS.items()}
    made["keep"] = (rng.random(INPUTS["keep"]) < 0.6) | (np.arange(T) == 0)
    return made
