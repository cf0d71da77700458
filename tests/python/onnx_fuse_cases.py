"""Attention as models say it, in ONNX's text: what must fuse, and what looks alike and must not.

Of each case the nodes, in a graph of these inputs: x and y, for one who projects; q, k, v; masks; and the output `out`.
"""

import numpy as np

B, H, S, T, D = 2, 4, 5, 6, 8
HIDDEN = float(np.finfo(np.float32).min)

INPUTS = {
    "q": ("float[B,4,S,8]", (B, H, S, D)),
    "k": ("float[B,4,T,8]", (B, H, T, D)),
    "v": ("float[B,4,T,8]", (B, H, T, D)),
    "kt": ("float[B,4,8,T]", (B, H, D, T)),
    "gk": ("float[B,2,T,8]", (B, 2, T, D)),  # key and value with two heads
    "x": ("float[B,S,32]", (B, S, H * D)),
    "y": ("float[B,T,32]", (B, T, H * D)),
    "q3": ("float[N,S,8]", (B * H, S, D)),
    "k3": ("float[N,T,8]", (B * H, T, D)),
    "bias": ("float[B,1,S,T]", (B, 1, S, T)),
    "pad": ("float[B,1,1,T]", (B, 1, 1, T)),
    "table": ("float[4,S,T]", (H, S, T)),
    "bias3": ("float[N,1,T]", (B * H, 1, T)),
    "keep": ("bool[B,1,S,T]", (B, 1, S, T)),
    "ones": ("float[B,1,S,T]", (B, 1, S, T)),
    "temperature": ("float", ()),
    "p": ("float[B,S,96]", (B, S, 3 * H * D)),
}

TAIL = "w = Softmax<axis = -1>(s)  out = MatMul(w, v)"
SPLIT = """
  shape = Constant<value = int64[4] {0, 0, 4, 8}>()
  q4 = Reshape(x, shape)  k4 = Reshape(y, shape)  v4 = Reshape(y, shape)
  qh = Transpose<perm = [0, 2, 1, 3]>(q4)  vh = Transpose<perm = [0, 2, 1, 3]>(v4)
"""
JOIN = """
  joined = Constant<value = int64[3] {0, 0, 32}>()
  o4 = Transpose<perm = [0, 2, 1, 3]>(o)  out = Reshape(o4, joined)
"""
SCALE = "c = Constant<value = float {0.35355339}>()  d = Constant<value = float {2.82842712}>()"
FILL = f"lowest = Constant<value = float {{{HIDDEN}}}>()  inf = Constant<value = float {{-inf}}>()  zero = Constant<value = float {{0.0}}>()"

# name: nodes, or (opset, nodes)
VARIANTS = {
    # --- scale ---
    "scale_mul": f"{SCALE} m = MatMul(q, kt) s = Mul(m, c) {TAIL}",
    "scale_mul_first": f"{SCALE} m = MatMul(q, kt) s = Mul(c, m) {TAIL}",
    "scale_div": f"{SCALE} m = MatMul(q, kt) s = Div(m, d) {TAIL}",
    "scale_on_query": f"{SCALE} z = Mul(q, c) s = MatMul(z, kt) {TAIL}",
    "scale_on_key": f"{SCALE} z = Div(kt, d) s = MatMul(q, z) {TAIL}",
    "scale_root_on_both": f"{SCALE} r = Sqrt(c) a = Mul(q, r) b = Mul(kt, r) s = MatMul(a, b) {TAIL}",
    "scale_of_a_shape": f"""
        n = Shape(q) last = Constant<value = int64 {{-1}}>() i = Gather<axis = 0>(n, last) f = Cast<to = 1>(i) r = Sqrt(f)
        m = MatMul(q, kt) s = Div(m, r) {TAIL}""",
    "scale_folded_into_weights": f"{SCALE} s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Mul(z, c) out = MatMul(w, v)",
    "scale_after_mask": f"{SCALE} m = MatMul(q, kt) a = Add(m, bias) s = Mul(a, c) {TAIL}",
    # --- mask ---
    "mask_added": f"m = MatMul(q, kt) s = Add(m, bias) {TAIL}",
    "mask_added_first": f"m = MatMul(q, kt) s = Add(bias, m) {TAIL}",
    "mask_padding": f"m = MatMul(q, kt) s = Add(m, pad) {TAIL}",
    "mask_subtracted": f"m = MatMul(q, kt) s = Sub(m, bias) {TAIL}",
    "mask_of_heads": f"m = MatMul(q, kt) s = Add(m, table) {TAIL}",
    "mask_twice": f"m = MatMul(q, kt) a = Add(m, bias) s = Add(a, pad) {TAIL}",
    "mask_sum": f"b = Add(table, pad) m = MatMul(q, kt) s = Add(m, b) {TAIL}",
    "mask_where": f"{FILL} m = MatMul(q, kt) s = Where(keep, m, lowest) {TAIL}",
    "mask_where_10000": f"f = Constant<value = float {{-10000.0}}>() m = MatMul(q, kt) s = Where(keep, m, f) {TAIL}",
    "mask_where_not": f"{FILL} n = Not(keep) m = MatMul(q, kt) s = Where(n, lowest, m) {TAIL}",
    "mask_where_inf": f"{FILL} m = MatMul(q, kt) s = Where(keep, m, inf) {TAIL}",
    "mask_where_inf_not": f"{FILL} n = Not(keep) m = MatMul(q, kt) s = Where(n, inf, m) {TAIL}",
    "mask_where_and_added": f"{FILL} m = MatMul(q, kt) a = Where(keep, m, inf) s = Add(a, pad) {TAIL}",
    "mask_where_zero": f"{FILL} b = Where(keep, zero, inf) m = MatMul(q, kt) s = Add(m, b) {TAIL}",
    "mask_arithmetic": f"""
        {FILL} one = Constant<value = float {{1.0}}>() r = Sub(one, ones) b = Mul(r, lowest) m = MatMul(q, kt) s = Add(m, b)
        {TAIL}""",
    "mask_causal_trilu": f"""
        {FILL} n = Shape(bias) full = Expand(lowest, n) upper = Constant<value = int64 {{1}}>() b = Trilu<upper = 1>(full, upper)
        m = MatMul(q, kt) s = Add(m, b) {TAIL}""",
    "mask_causal_range": f"""
        {FILL} n = Shape(bias) i2 = Constant<value = int64 {{2}}>() i3 = Constant<value = int64 {{3}}>()
        i0 = Constant<value = int64 {{0}}>() i1 = Constant<value = int64 {{1}}>() last = Constant<value = int64[1] {{-1}}>()
        rows = Gather(n, i2) columns = Gather(n, i3) r = Range(i0, rows, i1) c = Range(i0, columns, i1)
        column = Unsqueeze(r, last) b = LessOrEqual(c, column) m = MatMul(q, kt) s = Where(b, m, inf) {TAIL}""",
    # --- behind the softmax ---
    "guard_nan": f"""
        {FILL} m = MatMul(q, kt) s = Where(keep, m, inf) z = Softmax<axis = -1>(s) n = IsNaN(z) w = Where(n, zero, z)
        out = MatMul(w, v)""",
    "guard_rows": f"""
        {FILL} last = Constant<value = int64[1] {{-1}}>() b = Where(keep, zero, inf) m = MatMul(q, kt) s = Add(m, b)
        e = Equal(s, inf) n = Not(e) f = Cast<to = 6>(n) r = ReduceMax<keepdims = 1>(f, last) h = Cast<to = 9>(r) g = Not(h)
        z = Softmax<axis = -1>(s) w = Where(g, zero, z) out = MatMul(w, v)""",
    "dropout_and_identity": """
        s = MatMul(q, kt) z = Softmax<axis = -1>(s) a = Identity(z) w = Dropout(a) out = MatMul(w, v)""",
    "casts": "m = MatMul(q, kt) s = Cast<to = 1>(m) z = Softmax<axis = -1>(s) w = Cast<to = 1>(z) out = MatMul(w, v)",
    "guard_mask": f"""
        {FILL} last = Constant<value = int64[1] {{-1}}>() b = Where(keep, zero, inf) m = MatMul(q, kt) s = Add(m, b)
        top = ReduceMax<keepdims = 1>(b, last) g = Equal(top, inf) z = Softmax<axis = -1>(s) like = CastLike(zero, z)
        w = Where(g, like, z) out = MatMul(w, v)""",
    # --- softmax in parts ---
    "exp_and_sum": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) top = ReduceMax<keepdims = 1>(s, last) z = Sub(s, top)
        e = Exp(z) t = ReduceSum<keepdims = 1>(e, last) w = Div(e, t) out = MatMul(w, v)""",
    "exp_and_reciprocal": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) e = Exp(s) t = ReduceSum<keepdims = 1>(e, last)
        r = Reciprocal(t) w = Mul(e, r) out = MatMul(w, v)""",
    "log_softmax": "s = MatMul(q, kt) l = LogSoftmax<axis = -1>(s) w = Exp(l) out = MatMul(w, v)",
    "logsumexp": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) l = ReduceLogSumExp<keepdims = 1>(s, last) z = Sub(s, l)
        w = Exp(z) out = MatMul(w, v)""",
    "softcap": f"{SCALE} m = MatMul(q, kt) a = Div(m, d) t = Tanh(a) s = Mul(t, d) {TAIL}",
    "old_softmax": (11, "s = MatMul(q, kt) w = Softmax<axis = 3>(s) out = MatMul(w, v)"),
    # --- layouts ---
    "split_heads": f"""{SPLIT} kh = Transpose<perm = [0, 2, 3, 1]>(k4) s = MatMul(qh, kh) w = Softmax<axis = -1>(s)
        o = MatMul(w, vh) {JOIN}""",
    "key_transposed_twice": f"""{SPLIT} k5 = Transpose<perm = [0, 2, 1, 3]>(k4) kh = Transpose<perm = [0, 1, 3, 2]>(k5)
        s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o = MatMul(w, vh) {JOIN}""",
    "key_through_3d_static": f"""{SPLIT} a = Constant<value = int64[3] {{-1, 6, 8}}>() b = Constant<value = int64[4] {{2, 4, 8, 6}}>()
        k5 = Transpose<perm = [0, 2, 1, 3]>(k4) k6 = Reshape(k5, a) k7 = Transpose<perm = [0, 2, 1]>(k6) kh = Reshape(k7, b)
        s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o = MatMul(w, vh) {JOIN}""",
    "einsum": """
        shape = Constant<value = int64[4] {0, 0, 4, 8}>() a = Reshape(x, shape) b = Reshape(y, shape)
        s = Einsum<equation = "bqhd,bkhd->bhqk">(a, b) w = Softmax<axis = -1>(s) out = Einsum<equation = "bhqk,bkhd->bqhd">(w, b)""",
    "einsum_swapped": """
        s = Einsum<equation = "bhkd, bhqd -> bhqk">(k, q) w = Softmax<axis = -1>(s)
        out = Einsum<equation = "bhkd,bhqk->bhqd">(v, w)""",
    "packed_by_split": """
        z = Constant<value = int64[3] {32, 32, 32}>() a, b, c = Split<axis = 2>(p, z)
        shape = Constant<value = int64[4] {0, 0, 4, 8}>() a4 = Reshape(a, shape) b4 = Reshape(b, shape) c4 = Reshape(c, shape)
        qh = Transpose<perm = [0, 2, 1, 3]>(a4) kh = Transpose<perm = [0, 2, 3, 1]>(b4) vh = Transpose<perm = [0, 2, 1, 3]>(c4)
        s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o = MatMul(w, vh)""" + JOIN,
    "packed_by_gather": """
        shape = Constant<value = int64[5] {0, 0, 3, 4, 8}>() r = Reshape(p, shape) t = Transpose<perm = [2, 0, 3, 1, 4]>(r)
        i0 = Constant<value = int64 {0}>() i1 = Constant<value = int64 {1}>() i2 = Constant<value = int64 {2}>()
        a = Gather<axis = 0>(t, i0) b = Gather<axis = 0>(t, i1) c = Gather<axis = 0>(t, i2)
        kh = Transpose<perm = [0, 1, 3, 2]>(b) s = MatMul(a, kh) w = Softmax<axis = -1>(s) o = MatMul(w, c)""" + JOIN,
    "packed_by_slice": """
        shape = Constant<value = int64[5] {0, 0, 3, 4, 8}>() r = Reshape(p, shape) t = Transpose<perm = [2, 0, 3, 1, 4]>(r)
        i0 = Constant<value = int64[1] {0}>() i1 = Constant<value = int64[1] {1}>() i2 = Constant<value = int64[1] {2}>()
        i3 = Constant<value = int64[1] {3}>() a5 = Slice(t, i0, i1, i0) b5 = Slice(t, i1, i2, i0) c5 = Slice(t, i2, i3, i0)
        a = Squeeze(a5, i0) b = Squeeze(b5, i0) c = Squeeze(c5, i0)
        kh = Transpose<perm = [0, 1, 3, 2]>(b) s = MatMul(a, kh) w = Softmax<axis = -1>(s) o = MatMul(w, c)""" + JOIN,
    "stacks_of_3d": """
        kh = Transpose<perm = [0, 2, 1]>(k3) s = MatMul(q3, kh) w = Softmax<axis = -1>(s) out = MatMul(w, k3)""",
    "stacks_of_3d_masked": """
        kh = Transpose<perm = [0, 2, 1]>(k3) m = MatMul(q3, kh) s = Add(m, bias3) w = Softmax<axis = -1>(s)
        out = MatMul(w, k3)""",
    "key_is_value": "kh = Transpose<perm = [0, 1, 3, 2]>(v) s = MatMul(q, kh) w = Softmax<axis = -1>(s) out = MatMul(w, v)",
    "mask_on_merged_heads_static": f"""{SPLIT}
        a = Constant<value = int64[3] {{-1, 5, 8}}>() b = Constant<value = int64[3] {{-1, 6, 8}}>()
        e = Constant<value = int64[4] {{2, 4, 5, 6}}>() f = Constant<value = int64[3] {{8, 5, 6}}>()
        h = Constant<value = int64[4] {{2, 4, 5, 8}}>()
        k5 = Transpose<perm = [0, 2, 1, 3]>(k4) qm = Reshape(qh, a) km = Reshape(k5, b) vm = Reshape(vh, b)
        kh = Transpose<perm = [0, 2, 1]>(km) m = MatMul(qm, kh) m4 = Reshape(m, e) s4 = Add(m4, bias) s = Reshape(s4, f)
        w = Softmax<axis = -1>(s) om = MatMul(w, vm) o = Reshape(om, h) {JOIN}""",
    "out_is_asked_for_its_shape": f"""{SPLIT}
        a = Constant<value = int64[3] {{-1, 5, 8}}>() b = Constant<value = int64[3] {{-1, 6, 8}}>() shape4 = Shape(qh)
        k5 = Transpose<perm = [0, 2, 1, 3]>(k4) qm = Reshape(qh, a) km = Reshape(k5, b) vm = Reshape(vh, b)
        kh = Transpose<perm = [0, 2, 1]>(km) m = MatMul(qm, kh) e = Constant<value = int64[4] {{2, 4, 5, 6}}>()
        f = Constant<value = int64[3] {{8, 5, 6}}>() m4 = Reshape(m, e) s4 = Add(m4, bias) s = Reshape(s4, f)
        w = Softmax<axis = -1>(s) om = MatMul(w, vm) n = Shape(om) i = Constant<value = int64[1] {{1}}>()
        z = Constant<value = int64[1] {{0}}>() rows = Gather(n, i) h = Constant<value = int64[2] {{2, 4}}>()
        d = Constant<value = int64[1] {{8}}>() back = Concat<axis = 0>(h, rows, d) o = Reshape(om, back) {JOIN}""",
    # --- heads of key and value ---
    "repeated_heads": """
        i = Constant<value = int64[1] {2}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {1, 1, 2, 1, 1}>()
        e = Expand(u, n) z = Constant<value = int64[4] {0, 4, -1, 8}>() r = Reshape(e, z)
        kh = Transpose<perm = [0, 1, 3, 2]>(r) s = MatMul(q, kh) w = Softmax<axis = -1>(s) out = MatMul(w, r)""",
    # --- others read the weights ---
    "returned_weights": "s = MatMul(q, kt) weights = Softmax<axis = -1>(s) out = MatMul(weights, v)",
    "averaged_weights": """
        i = Constant<value = int64[1] {1}>() s = MatMul(q, kt) w = Softmax<axis = -1>(s) weights = ReduceSum<keepdims = 0>(w, i)
        out = MatMul(w, v)""",
}

# name: nodes and words of the reason
NEAR_MISSES = {
    "scale_not_constant": (f"m = MatMul(q, kt) s = Mul(m, temperature) {TAIL}", '"s" (Mul) scales the scores by what is not a constant'),
    "softmax_over_queries": ("s = MatMul(q, kt) w = Softmax<axis = 2>(s) out = MatMul(w, v)", "runs over axis 2 of 4"),
    "scores_read_twice": (f"s = MatMul(q, kt) {TAIL} other = Relu(s)", 'is also read by "other" (Relu)'),
    "scores_returned": (f"scores = MatMul(q, kt) w = Softmax<axis = -1>(scores) out = MatMul(w, v)", "is an output of the graph"),
    "mask_multiplied": (f"m = MatMul(q, kt) s = Mul(m, bias) {TAIL}", "by what is not a constant number"),
    "mask_is_a_factor_of_weights": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Mul(z, ones) out = MatMul(w, v)", "no product with values"),
    "scores_transposed": (f"m = MatMul(k, qt) s = Transpose<perm = [0, 1, 3, 2]>(m) {TAIL}", "does not cancel"),
    "fill_too_small": (f"f = Constant<value = float {{-100.0}}>() m = MatMul(q, kt) s = Where(keep, m, f) {TAIL}", "must be -10000 or less"),
    "fill_beside_others": (f"f = Constant<value = float {{-10000.0}}>() m = MatMul(q, kt) a = Where(keep, m, f) s = Add(a, pad) {TAIL}", "would not be the same beside other masks"),
    "scores_added_to_themselves": (f"m = MatMul(q, kt) s = Add(m, m) {TAIL}", 'it reads "m", which it replaces'),
    "weights_by_integers": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) i = Cast<to = 7>(z) w = Cast<to = 1>(i) out = MatMul(w, v)", "no product with values"),
    "fill_not_constant": (f"m = MatMul(q, kt) s = Where(keep, m, temperature) {TAIL}", "which is no constant"),
    "mask_is_one_number_for_a_row": (f"i = Constant<value = int64[1] {{-1}}>() b = ReduceMax<keepdims = 1>(bias, i) m = MatMul(q, kt) s = Add(m, b) {TAIL}", "one number for all keys"),
    "mask_has_more_dims": ("i = Constant<value = int64[1] {0}>() b = Unsqueeze(bias, i) m = MatMul(q, kt) s = Add(m, b) w = Softmax<axis = -1>(s) out = MatMul(w, v)", "have 5 and 4 dims"),
    "mask_before_softcap": (f"{SCALE} m = MatMul(q, kt) b = Add(m, bias) t = Tanh(b) s = Mul(t, d) {TAIL}", "before the softcap"),
    "weights_on_the_right": ("s = MatMul(q, kt) w = Softmax<axis = -1>(s) out = MatMul(vt, w)", "does not sum over the keys"),
    "negative_scale": (f"m = MatMul(q, kt) s = Neg(m) {TAIL}", '"s" (Neg) between the products is not understood'),
    "scale_below_zero": (f"f = Constant<value = float {{-1.0}}>() m = MatMul(q, kt) s = Mul(m, f) {TAIL}", "the scale is -1"),
    "training_dropout": ("t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Dropout(z, r, t) out = MatMul(w, v)", "no product with values"),
    "class_softmax": ("s = MatMul(q, kt) out = Softmax<axis = -1>(s)", "no product with values follows"),
    "additive": ("a = Tanh(q) s = Add(a, q) w = Softmax<axis = -1>(s) out = MatMul(w, kt)", "no product of queries and keys"),
    "weights_change": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Relu(z) out = MatMul(w, v)", "no product with values"),
    "guard_by_another_mask": (f"""
        {FILL} last = Constant<value = int64[1] {{-1}}>() b = Where(keep, zero, inf) m = MatMul(q, kt) s = Add(m, b)
        top = ReduceMax<keepdims = 1>(bias, last) g = Equal(top, inf) z = Softmax<axis = -1>(s) w = Where(g, zero, z)
        out = MatMul(w, v)""", "by what is no mask of the scores"),
    "guard_of_other_rows": (f"{FILL} n = IsNaN(bias) s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Where(n, zero, z) out = MatMul(w, v)", "no product with values"),
}  # fmt: skip
