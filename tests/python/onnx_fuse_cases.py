"""Attention as models say it, in ONNX's text: what must fuse, and what looks alike and must not.

Of each case the nodes, in a graph of these inputs: x and y, for one who projects; q, k, v; masks; and the output `out`.
"""

import numpy as np

B, H, S, T, D = 2, 4, 5, 6, 8
GRID = "grid = Constant<value = float {0.05}>() none = Constant<value = int8 {0}>()"
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
    "hide3": ("bool[N,1,T]", (B * H, 1, T)),  # the first key is visible
    "keep": ("bool[B,1,S,T]", (B, 1, S, T)),
    "some": ("bool[B,1,1,T]", (B, 1, 1, T)),  # the first key is visible
    "lens": ("int64[B,1,1,1]", (B, 1, 1, 1)),
    "ones": ("float[B,1,S,T]", (B, 1, S, T)),
    "temperature": ("float", ()),
    "sinks": ("float[4]", (H,)),
    "scale_of_head": ("float[4,1,1]", (H, 1, 1)),
    "row_sinks": ("float[B,4,S,1]", (B, H, S, 1)),
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
# Two heads of key and value, each of which two of the query read.
GROUPS = """
  halves = Constant<value = int64[2] {16, 16}>() a, b = Split<axis = 2>(y, halves)
  five = Constant<value = int64[5] {0, 0, 2, 2, 8}>() joined = Constant<value = int64[3] {0, 0, 32}>()
  q5 = Reshape(x, five) qh = Transpose<perm = [0, 2, 3, 1, 4]>(q5)
"""
SCALE = "c = Constant<value = float {0.35355339}>()  d = Constant<value = float {2.82842712}>()"
FILL = f"lowest = Constant<value = float {{{HIDDEN}}}>()  inf = Constant<value = float {{-inf}}>()  zero = Constant<value = float {{0.0}}>()"

# Places of queries and keys, as columns and rows.
PLACES = """
  n = Shape(bias) i2 = Constant<value = int64 {2}>() i3 = Constant<value = int64 {3}>() i0 = Constant<value = int64 {0}>()
  i1 = Constant<value = int64 {1}>() last = Constant<value = int64[1] {-1}>() lead = Constant<value = int64[2] {0, 1}>()
  num_queries = Gather(n, i2) num_keys = Gather(n, i3) i = Range(i0, num_queries, i1) r1 = Range(i0, num_keys, i1)
  c1 = Unsqueeze(i, last) c = Unsqueeze(c1, lead) r = Unsqueeze(r1, lead)
"""
MASKED = f"m = MatMul(q, kt) s = Where(seen, m, inf) {TAIL}"
TRIANGLE = ", ".join("0.0" if j <= i + 1 else "-inf" for i in range(7) for j in range(8))  # one key further than causal

# name: nodes, and what the operator of our domain is told by them: is_causal, left_window_size, right_window_size, mask
PLACES_AS_OPTIONS = {
    "causal": (f"{FILL} {PLACES} seen = LessOrEqual(r, c) {MASKED}", (1, None, None, "")),
    "causal_by_not": (f"{FILL} {PLACES} b = Greater(r, c) seen = Not(b) {MASKED}", (1, None, None, "")),
    "causal_hidden": (f"{FILL} {PLACES} b = Less(c, r) m = MatMul(q, kt) s = Where(b, inf, m) {TAIL}", (1, None, None, "")),
    "causal_by_a_large_number": (f"{FILL} {PLACES} b = Less(c, r) m = MatMul(q, kt) s = Where(b, lowest, m) {TAIL}", (1, None, None, "")),
    "causal_added": (f"{FILL} {PLACES} b = LessOrEqual(r, c) a = Where(b, zero, lowest) m = MatMul(q, kt) s = Add(m, a) {TAIL}", (1, None, None, "")),
    "causal_by_a_product": (f"{FILL} {PLACES} b = Greater(r, c) f = Cast<to = 1>(b) a = Mul(f, lowest) m = MatMul(q, kt) s = Add(m, a) {TAIL}", (1, None, None, "")),
    "causal_by_a_difference": (f"{FILL} {PLACES} one = Constant<value = float {{1.0}}>() large = Constant<value = float {{1e30}}>() b = LessOrEqual(r, c) f = Cast<to = 1>(b) h = Sub(f, one) a = Mul(large, h) m = MatMul(q, kt) s = Add(m, a) {TAIL}", (1, None, None, "")),
    "causal_by_trilu": (f"{FILL} n = Shape(bias) full = Expand(lowest, n) one = Constant<value = int64 {{1}}>() a = Trilu<upper = 1>(full, one) m = MatMul(q, kt) s = Add(m, a) {TAIL}", (1, None, None, "")),
    "causal_by_trilu_of_ones": (f"{FILL} n = Shape(bias) one = Constant<value = float {{1.0}}>() full = Expand(one, n) t = Trilu<upper = 0>(full) b = Equal(t, zero) m = MatMul(q, kt) s = Where(b, inf, m) {TAIL}", (1, None, None, "")),
    "causal_in_numbers": (f"{FILL} {PLACES} f = Cast<to = 1>(r) g = Cast<to = 1>(c) seen = LessOrEqual(f, g) {MASKED}", (1, None, None, "")),
    "causal_and_padding": (f"{FILL} {PLACES} b = LessOrEqual(r, c) seen = And(b, some) {MASKED}", (1, None, None, "some")),
    "causal_or_not_padding": (f"{FILL} {PLACES} b = Greater(r, c) o = Not(some) h = Or(o, b) m = MatMul(q, kt) s = Where(h, inf, m) {TAIL}", (1, None, None, "some")),
    "causal_and_padding_written_out": (f"{FILL} {PLACES} b = LessOrEqual(r, c) h = And(some, b) seen = Expand(h, n) {MASKED}", (1, None, None, "some")),
    "causal_and_a_bias": (f"{FILL} {PLACES} b = LessOrEqual(r, c) m = MatMul(q, kt) a = Add(m, bias) s = Where(b, a, inf) {TAIL}", (1, None, None, "bias")),
    "window": (f"{FILL} {PLACES} w3 = Constant<value = int64 {{3}}>() b = LessOrEqual(r, c) e = Sub(c, w3) f = Greater(r, e) seen = And(b, f) {MASKED}", (1, 2, None, "")),
    "window_by_distance": (f"{FILL} {PLACES} w3 = Constant<value = int64 {{3}}>() d = Sub(c, r) f = Less(d, w3) e = GreaterOrEqual(d, i0) g = And(e, f) seen = And(some, g) {MASKED}", (1, 2, None, "some")),
    "window_on_both_sides": (f"{FILL} {PLACES} d = Sub(r, c) f = LessOrEqual(d, i2) e = Add(d, i1) g = GreaterOrEqual(e, i0) seen = And(f, g) {MASKED}", (0, 1, 2, "")),
    "window_in_a_window": (f"{FILL} {PLACES} d = Sub(r, c) f = LessOrEqual(d, i2) g = LessOrEqual(d, i3) seen = And(f, g) {MASKED}", (0, None, 2, "")),
    "keys_behind_alone": (f"{FILL} {PLACES} seen = GreaterOrEqual(r, c) {MASKED}", (0, 0, None, "")),
    "one_key_further": (f"{FILL} {PLACES} d = Sub(r, i1) seen = LessOrEqual(d, c) {MASKED}", (0, None, 1, "")),
    "part_of_a_constant": (f"{FILL} t = Constant<value = float[7,8] {{{TRIANGLE}}}>() e = Constant<value = int64[4] {{2, 4, 5, 6}}>() i0 = Constant<value = int64[2] {{0, 1}}>() i5 = Constant<value = int64[2] {{5, 7}}>() z = Constant<value = float {{0.0}}>() u = Equal(t, z) b = Slice(u, i0, i5) m = MatMul(q, kt) s = Where(b, m, inf) {TAIL}", (1, None, None, "")),
}  # fmt: skip

# The same with masks that stay tensors, and why, if a mask by places is recognised at all.
PLACES_AS_TENSORS = {
    "own_key_hidden": (f"{FILL} {PLACES} d = Sub(c, i1) u = LessOrEqual(r, d) e = Equal(r, i0) seen = Or(u, e) {MASKED}", ""),
    "off_by_one": (f"{FILL} {PLACES} b = Less(r, c) m = MatMul(q, kt) s = Where(b, m, lowest) {TAIL}", "own place"),
    "diagonal_of_sizes": (f"{FILL} {PLACES} d = Sub(num_keys, num_queries) e = Add(c, d) seen = LessOrEqual(r, e) {MASKED}", "its diagonal depends on sizes"),
    "other_in_each_batch": (f"{FILL} {PLACES} e = Add(c, lens) seen = LessOrEqual(r, e) {MASKED}", ""),
    "steps_of_two": (f"{FILL} {PLACES} e = Mul(c, i2) seen = LessOrEqual(r, e) {MASKED}", ""),
    "places_that_are_added": (f"{FILL} {PLACES} e = Add(c, r) seen = LessOrEqual(e, i3) d = Equal(r, i0) h = Or(seen, d) m = MatMul(q, kt) s = Where(h, m, inf) {TAIL}", ""),
    "first_keys_alone": (f"{FILL} {PLACES} seen = LessOrEqual(r, i2) {MASKED}", ""),
    "finite_beside_padding": (f"{FILL} {PLACES} b = LessOrEqual(r, c) seen = And(b, some) m = MatMul(q, kt) s = Where(seen, m, lowest) {TAIL}", "rows that see no key"),
    "finite_beside_a_bias": (f"{FILL} {PLACES} b = LessOrEqual(r, c) a = Where(b, zero, lowest) m = MatMul(q, kt) e = Add(m, bias) s = Add(e, a) {TAIL}", "rows that see no key"),
    "small_number": (f"{FILL} {PLACES} f = Constant<value = float {{-20000.0}}>() b = LessOrEqual(r, c) a = Where(b, zero, f) m = MatMul(q, kt) s = Add(m, a) {TAIL}", "it hides by -20000 only"),
}  # fmt: skip

# Images cut into two windows each, which are dims of their own where their mask is added.
WINDOWS = """
  q2 = Concat<axis = 0>(q, q) kt2 = Concat<axis = 0>(kt, kt) v2 = Concat<axis = 0>(v, v) m = MatMul(q2, kt2)
  i1 = Constant<value = int64[1] {1}>() i3 = Constant<value = int64[1] {3}>() n = Shape(table) matrix = Slice(n, i1, i3)
"""
IN_WINDOWS = """
  apart = Concat<axis = 0>(lead, matrix) m5 = Reshape(m, apart) pair = Constant<value = int64[2] {1, 3}>()
  two = Gather(table, pair) mask = Unsqueeze(two, i) s5 = Add(m5, mask) four = Constant<value = int64[2] {-1, 4}>()
  together = Concat<axis = 0>(four, matrix) s = Reshape(s5, together) w = Softmax<axis = -1>(s) out = MatMul(w, v2)
"""

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
    "scale_of_an_input": f"m = MatMul(q, kt) s = Div(m, temperature) {TAIL}",
    "scale_of_each_head": f"{FILL} {SCALE} m = MatMul(q, kt) a = Div(m, d) t = Mul(a, scale_of_head) u = Add(table, t) s = Where(keep, u, lowest) {TAIL}",
    "scale_of_each_row": f"m = MatMul(q, kt) s = Mul(row_sinks, m) {TAIL}",
    "scale_of_each_row_in_a_softcap": f"{SCALE} m = MatMul(q, kt) a = Mul(m, row_sinks) t = Tanh(a) s = Mul(t, d) {TAIL}",
    "returned_scores_behind_a_scale_of_each_head": "m = MatMul(q, kt) scores = Mul(m, scale_of_head) w = Softmax<axis = -1>(scores) out = MatMul(w, v)",
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
    "mask_where_1e9": f"f = Constant<value = float {{-1e9}}>() m = MatMul(q, kt) s = Where(keep, m, f) {TAIL}",
    "mask_by_gather_nd_static": f"""
        flat = Constant<value = int64[2] {{2, 6}}>() p2 = Reshape(pad, flat) places = Constant<value = int64[2,6,2] {{{", ".join(f"{b}, {t}" for b in range(B) for t in range(T))}}}>()
        g = GatherND(p2, places) ahead = Constant<value = int64[2] {{1, 2}}>() b = Unsqueeze(g, ahead) m = MatMul(q, kt) s = Add(m, b) {TAIL}""",
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
    "mask_of_an_eye": f"""
        {SCALE} n = Shape(table) i1 = Constant<value = int64[2] {{1, 2}}>() rows = Gather(n, i1) zeros = ConstantOfShape(rows)
        own = EyeLike(zeros) large = Constant<value = float {{1e30}}>() b = Mul(own, large) m = MatMul(q, kt) s = Sub(m, b) {TAIL}""",
    "mask_of_the_scores_shape": f"""
        {FILL} m = MatMul(q, kt) n = Shape(m) full = Expand(lowest, n) upper = Constant<value = int64 {{1}}>()
        b = Trilu<upper = 1>(full, upper) s = Add(m, b) {TAIL}""",
    "mask_of_windows": f"""{WINDOWS} lead = Constant<value = int64[3] {{-1, 2, 4}}>() i = Constant<value = int64[2] {{0, 2}}>() {IN_WINDOWS}""",
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
    "exp_less_a_bounded_maximum": f"""
        {FILL} last = Constant<value = int64[1] {{-1}}>() s = MatMul(q, kt) top = ReduceMax<keepdims = 1>(s, last) least = Max(inf, top) z = Sub(s, least)
        e = Exp(z) t = ReduceSum<keepdims = 1>(e, last) w = Div(e, t) out = MatMul(w, v)""",
    "exp_and_reciprocal": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) e = Exp(s) t = ReduceSum<keepdims = 1>(e, last)
        r = Reciprocal(t) w = Mul(e, r) out = MatMul(w, v)""",
    "exp_less_any_number": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) mean = ReduceMean<keepdims = 1>(s, last) z = Sub(s, mean)
        e = Exp(z) t = ReduceSum<keepdims = 0>(e, last) u = Unsqueeze(t, last) w = Div(e, u) out = MatMul(w, v)""",
    "weights_negated": "s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Neg(z) out = MatMul(w, v)",
    "log_softmax": "s = MatMul(q, kt) l = LogSoftmax<axis = -1>(s) w = Exp(l) out = MatMul(w, v)",
    "logsumexp": """
        last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) l = ReduceLogSumExp<keepdims = 1>(s, last) z = Sub(s, l)
        w = Exp(z) out = MatMul(w, v)""",
    "softmax_less_the_maximum": """
        last = Constant<value = int64[1] {-1}>() a = MatMul(q, kt) top = ReduceMax<keepdims = 1>(a, last) s = Sub(a, top)
        w = Softmax<axis = -1>(s) out = MatMul(w, v)""",
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
    "packed_by_sizes_that_are_computed": f"""
        n = Shape(p) i2 = Constant<value = int64[1] {{2}}>() i3 = Constant<value = int64[1] {{3}}>() i0 = Constant<value = int64[1] {{0}}>()
        all = Gather<axis = 0>(n, i2) one = Div(all, i3) two = Mul(one, i2) a = Slice(p, i0, one, i2) b = Slice(p, one, two, i2)
        c = Slice(p, two, all, i2) shape = Constant<value = int64[4] {{0, 0, 4, 8}}>() q4 = Reshape(a, shape) k4 = Reshape(b, shape)
        v4 = Reshape(c, shape) qh = Transpose<perm = [0, 2, 1, 3]>(q4) kh = Transpose<perm = [0, 2, 3, 1]>(k4)
        vh = Transpose<perm = [0, 2, 1, 3]>(v4) s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o = MatMul(w, vh) {JOIN}""",
    "einsum": """
        shape = Constant<value = int64[4] {0, 0, 4, 8}>() a = Reshape(x, shape) b = Reshape(y, shape)
        s = Einsum<equation = "bqhd,bkhd->bhqk">(a, b) w = Softmax<axis = -1>(s) out = Einsum<equation = "bhqk,bkhd->bqhd">(w, b)""",
    "einsum_swapped": """
        s = Einsum<equation = "bhkd, bhqd -> bhqk">(k, q) w = Softmax<axis = -1>(s)
        out = Einsum<equation = "bhkd,bhqk->bhqd">(v, w)""",
    "grouped_in_five_dims": f"""{GROUPS} single = Constant<value = int64[5] {{0, 0, 2, 1, 8}}>() last = Constant<value = int64[1] {{1}}>()
        kg = Reshape(a, single) vg = Reshape(b, single) kh = Transpose<perm = [0, 2, 3, 4, 1]>(kg)
        vh = Transpose<perm = [0, 2, 3, 1, 4]>(vg) m = MatMul(qh, kh) hide = Unsqueeze(pad, last) s = Add(m, hide)
        w = Softmax<axis = -1>(s) o5 = MatMul(w, vh) o4 = Transpose<perm = [0, 3, 1, 2, 4]>(o5) out = Reshape(o4, joined)""",
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
    "packed_by_unsqueeze_and_gather": """
        shape = Constant<value = int64[4] {0, 0, 3, 32}>() r = Reshape(p, shape) z0 = Constant<value = int64[1] {0}>() z3 = Constant<value = int64[1] {3}>()
        u = Unsqueeze(r, z0) t5 = Transpose<perm = [3, 1, 2, 0, 4]>(u) t = Squeeze(t5, z3) heads = Constant<value = int64[4] {0, 0, 4, 8}>()
        i0 = Constant<value = int64 {0}>() i1 = Constant<value = int64 {1}>() i2 = Constant<value = int64 {2}>()
        a = Gather<axis = 0>(t, i0) b = Gather<axis = 0>(t, i1) c = Gather<axis = 0>(t, i2) a4 = Reshape(a, heads) b4 = Reshape(b, heads) c4 = Reshape(c, heads)
        qh = Transpose<perm = [0, 2, 1, 3]>(a4) kh = Transpose<perm = [0, 2, 3, 1]>(b4) vh = Transpose<perm = [0, 2, 1, 3]>(c4)
        s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o = MatMul(w, vh)""" + JOIN,
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
    "stacks_of_3d_filled": f"""
        {FILL} kh = Transpose<perm = [0, 2, 1]>(k3) m = MatMul(q3, kh) s = Where(hide3, lowest, m) w = Softmax<axis = -1>(s)
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
    "stacks_of_3d_in_another_order": """
        a = Transpose<perm = [2, 0, 1]>(q3) b = Relu(a) c = Transpose<perm = [0, 2, 1]>(k3) d = Relu(c)
        s = Einsum<equation = "dns,ndt->nst">(b, d) w = Softmax<axis = -1>(s) o = Einsum<equation = "nst,ndt->sdn">(w, d) out = Relu(o)""",
    "stacks_of_3d_time_first": f"""
        {SCALE} xt = Transpose<perm = [1, 0, 2]>(x) yt = Transpose<perm = [1, 0, 2]>(y) n = Shape(xt) i1 = Constant<value = int64[1] {{1}}>()
        b = Gather<axis = 0>(n, i1) h = Constant<value = int64[1] {{4}}>() bh = Mul(b, h) i0 = Constant<value = int64[1] {{0}}>()
        i8 = Constant<value = int64[1] {{8}}>() to = Concat<axis = 0>(i0, bh, i8) a = Reshape(xt, to) e = Reshape(yt, to) f = Reshape(yt, to)
        q_ = Transpose<perm = [1, 0, 2]>(a) qs = Mul(q_, c) k_ = Transpose<perm = [1, 2, 0]>(e) v_ = Transpose<perm = [1, 0, 2]>(f)
        s = MatMul(qs, k_) w = Softmax<axis = -1>(s) o = MatMul(w, v_) ot = Transpose<perm = [1, 0, 2]>(o) o4 = Relu(ot) out = Identity(o4)""",
    "returned_weights_of_3d": "c = Transpose<perm = [0, 2, 1]>(k3) s = MatMul(q3, c) weights = Softmax<axis = -1>(s) out = MatMul(weights, k3)",
    "operands_of_integers": (19, f"""{GRID} a = QuantizeLinear(k, grid, none) b = DequantizeLinear(a, grid, none)
        bt = Transpose<perm = [0, 1, 3, 2]>(b) s = MatMul(q, bt) g = QuantizeLinear(v, grid, none)
        h = DequantizeLinear(g, grid, none) w = Softmax<axis = -1>(s) out = MatMul(w, h)"""),
    # --- heads of key and value ---
    "repeated_heads": """
        i = Constant<value = int64[1] {2}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {1, 1, 2, 1, 1}>()
        e = Expand(u, n) z = Constant<value = int64[4] {0, 4, -1, 8}>() r = Reshape(e, z)
        kh = Transpose<perm = [0, 1, 3, 2]>(r) s = MatMul(q, kh) w = Softmax<axis = -1>(s) out = MatMul(w, r)""",
    "repeated_heads_by_tile": """
        i = Constant<value = int64[1] {2}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {1, 1, 2, 1, 1}>()
        e = Tile(u, n) z = Constant<value = int64[4] {0, 4, -1, 8}>() r = Reshape(e, z)
        kh = Transpose<perm = [0, 1, 3, 2]>(r) s = MatMul(q, kh) w = Softmax<axis = -1>(s) out = MatMul(w, r)""",
    "repeated_heads_by_gather": """
        n = Constant<value = int64[4] {0, 0, 1, 1}>() r = Gather<axis = 1>(gk, n)
        kh = Transpose<perm = [0, 1, 3, 2]>(r) s = MatMul(q, kh) w = Softmax<axis = -1>(s) out = MatMul(w, r)""",
    "grouped_in_five_dims_and_a_table": f"""{GROUPS} single = Constant<value = int64[5] {{0, 0, 2, 1, 8}}>() pairs = Constant<value = int64[4] {{2, 2, 5, 6}}>()
        kg = Reshape(a, single) vg = Reshape(b, single) kh = Transpose<perm = [0, 2, 3, 4, 1]>(kg) each = Reshape(table, pairs)
        vh = Transpose<perm = [0, 2, 3, 1, 4]>(vg) m = MatMul(qh, kh) s = Add(m, each) w = Softmax<axis = -1>(s) o5 = MatMul(w, vh)
        o4 = Transpose<perm = [0, 3, 1, 2, 4]>(o5) out = Reshape(o4, joined)""",
    "repeated_heads_and_their_shape": """
        i = Constant<value = int64[1] {2}>() u = Unsqueeze(gk, i) n = Constant<value = int64[5] {1, 1, 2, 1, 1}>()
        e = Expand(u, n) z = Constant<value = int64[4] {0, 4, -1, 8}>() r = Reshape(e, z) kh = Transpose<perm = [0, 1, 3, 2]>(r)
        s = MatMul(q, kh) w = Softmax<axis = -1>(s) o4 = MatMul(w, r) t = Transpose<perm = [0, 2, 1, 3]>(o4) i3 = Constant<value = int64[1] {3}>()
        m = Shape(r) d = Gather<axis = 0>(m, i3) h = Constant<value = int64[1] {4}>() f = Mul(h, d) g = Constant<value = int64[2] {0, 0}>()
        back = Concat<axis = 0>(g, f) out = Reshape(t, back)""",
    # --- others read the weights ---
    "returned_weights": "s = MatMul(q, kt) weights = Softmax<axis = -1>(s) out = MatMul(weights, v)",
    "returned_scores": f"{SCALE} m = MatMul(q, kt) scores = Mul(m, c) w = Softmax<axis = -1>(scores) out = MatMul(w, v)",
    "scores_others_read": f"s = MatMul(q, kt) {TAIL} other = Relu(s)",
    "returned_scores_before_the_mask": f"scores = MatMul(q, kt) s = Add(scores, bias) {TAIL}",
    "returned_scores_behind_the_mask": f"m = MatMul(q, kt) scores = Add(m, bias) w = Softmax<axis = -1>(scores) out = MatMul(w, v)",
    "returned_scores_behind_a_boolean_mask": f"{FILL} m = MatMul(q, kt) scores = Where(keep, m, inf) w = Softmax<axis = -1>(scores) out = MatMul(w, v)",
    "returned_scores_behind_the_softcap": f"{SCALE} m = MatMul(q, kt) a = Div(m, d) t = Tanh(a) scores = Mul(t, d) s = Add(scores, bias) {TAIL}",
    "averaged_weights": """
        i = Constant<value = int64[1] {1}>() s = MatMul(q, kt) w = Softmax<axis = -1>(s) weights = ReduceSum<keepdims = 0>(w, i)
        out = MatMul(w, v)""",
}

# What no option says, as a program: nodes and its text. The first ones are near-misses of ONNX's own operator too.
PROGRAMS = {
    "mask_multiplied": (f"m = MatMul(q, kt) s = Mul(m, bias) {TAIL}", "c0: float; score = (score * c0[b, 0, q, k])"),
    "mask_multiplied_and_added": (f"{FILL} one = Constant<value = float {{1.0}}>() m = MatMul(q, kt) a = Mul(m, ones) r = Sub(one, ones) b = Mul(r, lowest) s = Add(a, b) {TAIL}",
                                  "c0: float; c1: float; score = ((score * c0[b, 0, q, k]) + c1[b, 0, q, k])"),
    "fill_too_small": (f"f = Constant<value = float {{-100.0}}>() m = MatMul(q, kt) s = Where(keep, m, f) {TAIL}",
                       "c0: bool; score = where(c0[b, 0, q, k], score, (-100.0))"),
    "fill_not_constant": (f"m = MatMul(q, kt) s = Where(keep, m, temperature) {TAIL}",
                          "c0: bool; c1: float; score = where(c0[b, 0, q, k], score, c1[])"),
    "mask_before_softcap": (f"{SCALE} m = MatMul(q, kt) b = Add(m, bias) t = Tanh(b) s = Mul(t, d) {TAIL}",
                            "c0: float; score = (tanh((score + c0[b, 0, q, k])) * 2.8284270763397217)"),
    "number_before_softcap": (f"{SCALE} m = MatMul(q, kt) b = Add(m, c) t = Tanh(b) s = Mul(t, d) {TAIL}",
                              "score = (tanh((score + 0.35355338454246521)) * 2.8284270763397217)"),
    "negative_scale": (f"m = MatMul(q, kt) s = Neg(m) {TAIL}", "score = (-score)"),
    "scores_taken_from_a_number": (f"{SCALE} m = MatMul(q, kt) s = Sub(c, m) {TAIL}", "score = (0.35355338454246521 - score)"),
    "scale_of_each_key": (f"{FILL} {SCALE} m = MatMul(q, kt) a = Div(m, d) t = Mul(a, pad) u = Add(table, t) s = Where(keep, u, lowest) {TAIL}",
                          "c0: bool; c1: float; c2: float; score = where(c0[b, 0, q, k], (c1[h, q, k] + (score * c2[b, 0, 0, k])), (-3.4028234663852886e+38))"),
    "scale_of_each_head_before_the_mask_is_whole": (f"m = MatMul(q, kt) a = Add(m, bias) s = Mul(a, scale_of_head) {TAIL}",
                                                    "c0: float; c1: float; score = ((score + c0[b, 0, q, k]) * c1[h, 0, 0])"),
    "scores_forked": (f"{SCALE} m = MatMul(q, kt) a = Sigmoid(m) e = Mul(m, c) n = Less(e, temperature) s = Where(n, a, e) {TAIL}",
                      "c0: float; score = where(((score * 0.35355338454246521) < c0[]), sigmoid(score), (score * 0.35355338454246521))"),
}  # fmt: skip
NINE = "s0 = Identity(m) " + " ".join(f"c{i} = Constant<value = float {{{i + 2}.0}}>() a{i} = Mul(bias, c{i}) s{i + 1} = Mul(s{i}, a{i})" for i in range(9))
NO_PROGRAMS = {
    "scores_and_their_maximum": (f"back = Constant<value = int64[1] {{-1}}>() m = MatMul(q, kt) t = ReduceMax<keepdims = 1>(m, back) s = Mul(m, t) {TAIL}", '"m", of "m" (MatMul), is also read by "t" (ReduceMax)'),
    "two_products": (f"m = MatMul(q, kt) a = Neg(q) n = MatMul(a, kt) t = Tanh(n) s = Mul(m, t) {TAIL}", "by what is not a constant number"),
    "scores_read_within_a_program": (f"scores = MatMul(q, kt) s = Mul(scores, bias) {TAIL}", '"scores" (MatMul), is an output of the graph'),
    "nine_tensors": (f"m = MatMul(q, kt) {NINE} s = Identity(s9) {TAIL}", "by what is not a constant number"),
    "scores_round": (f"m = MatMul(q, kt) i = Cast<to = 7>(m) f = Cast<to = 1>(i) s = Mul(f, bias) {TAIL}", "by what is not a constant number"),
    "a_tensor_that_is_wider": (f"i = Constant<value = int64[1] {{0}}>() a = Unsqueeze(bias, i) m = MatMul(q, kt) u = Mul(m, a) t = Squeeze(u, i) s = Mul(t, bias) {TAIL}", "by what is not a constant number"),
}  # fmt: skip

# One more logit for each head beside the scores: all of a row, joined, go through the softmax, and the last or first one is cut off.
SINK = """
  i1 = Constant<value = int64[1] {1}>() i2 = Constant<value = int64[1] {2}>() f4 = Constant<value = int64[4] {1, 4, 1, 1}>() n = Shape(q)
  lead = Slice(n, i0, i3) size = Concat<axis = 0>(lead, i1) own = Reshape(sinks, f4) sink = Expand(own, size)
"""
CUT = """
  i0 = Constant<value = int64[1] {0}>() i3 = Constant<value = int64[1] {3}>() back = Constant<value = int64[1] {-1}>()
  most = Constant<value = int64[1] {9223372036854775807}>()
"""
SINK_TAIL = "z = Softmax<axis = -1>(j) w = Slice(z, i0, back, i3) out = MatMul(w, v)"
SINKS = {
    "sinks_behind": f"{CUT} {SINK} m = MatMul(q, kt) s = Add(m, bias) j = Concat<axis = -1>(s, sink) {SINK_TAIL}",
    "sinks_ahead": f"""{CUT} {SINK} s = MatMul(q, kt) j = Concat<axis = 3>(sink, s) z = Softmax<axis = -1>(j)
        w = Slice(z, i1, most, i3) out = MatMul(w, v)""",
    "sinks_less_the_maximum": f"""{CUT} {SINK} {SCALE} m = MatMul(q, kt) s = Mul(m, c) a = Concat<axis = -1>(s, sink)
        t = ReduceMax<keepdims = 1>(a, back) j = Sub(a, t) z = Softmax<axis = -1>(j) zc = Cast<to = 1>(z)
        weights = Slice(zc, i0, back, i3) out = MatMul(weights, v)""",
    "sinks_of_grouped_heads": f"""{CUT} {SINK} i = Constant<value = int64[1] {{2}}>() u = Unsqueeze(gk, i)
        g = Constant<value = int64[5] {{1, 1, 2, 1, 1}}>() e = Expand(u, g) f = Constant<value = int64[4] {{0, 4, -1, 8}}>()
        r = Reshape(e, f) kh = Transpose<perm = [0, 1, 3, 2]>(r) s = MatMul(q, kh) j = Concat<axis = -1>(s, sink)
        z = Softmax<axis = -1>(j) w = Slice(z, i0, back, i3) out = MatMul(w, r)""",
    "sinks_written_out_static": f"""{CUT} sizes = Constant<value = int64[4] {{2, 4, 5, 6}}>() s = MatMul(q, kt)
        sink = Constant<value = float[2,4,5,1] {{{", ".join(str(0.5 * (i // S % H) - 1) for i in range(B * H * S))}}}>()
        j = Concat<axis = -1>(s, sink) {SINK_TAIL}""",
}
NO_SINKS = {
    "sinks_of_each_row": (f"{CUT} s = MatMul(q, kt) j = Concat<axis = -1>(s, row_sinks) {SINK_TAIL}", "are not known to be one for each head"),
    "sinks_written_out_differ": (SINKS["sinks_written_out_static"].replace("{-1.0, ", "{-1.5, "), "are not known to be one for each head"),
    "a_key_is_cut_off": (f"{CUT} {SINK} s = MatMul(q, kt) j = Concat<axis = -1>(s, sink) z = Softmax<axis = -1>(j) w = Slice(z, i1, most, i3) out = MatMul(w, v)", 'no product with values follows the softmax, but "w" (Slice)'),
    "sinks_are_weighted": (f"{CUT} {SINK} s = MatMul(q, kt) j = Concat<axis = -1>(s, sink) {SINK_TAIL} other = Relu(z)", '"z", of "z" (Softmax), is also read by "other" (Relu)'),
    "scores_with_sinks_are_shifted": (f"{CUT} {SINK} m = MatMul(q, kt) one = Constant<value = float {{1.0}}>() s = Add(m, one) j = Concat<axis = -1>(s, sink) {SINK_TAIL}", '"one" of "s" (Add) is one number for all keys'),
    "scores_with_sinks_lose_the_maximum": (f"{CUT} {SINK} m = MatMul(q, kt) t = ReduceMax<keepdims = 1>(m, back) s = Sub(m, t) j = Concat<axis = -1>(s, sink) {SINK_TAIL}", 'it reads "t", which is made of "m", its own scores'),
    "scores_with_sinks_are_scaled": (f"{CUT} {SINK} {SCALE} s = MatMul(q, kt) a = Concat<axis = -1>(s, sink) j = Mul(a, c) {SINK_TAIL}", "no product with values follows"),
    "weights_beside_sinks_sum_to_one": (f"{CUT} {SINK} s = MatMul(q, kt) j = Concat<axis = -1>(s, sink) z = Softmax<axis = -1>(j) u = Slice(z, i0, back, i3) t = ReduceSum<keepdims = 1>(u, back) w = Div(u, t) out = MatMul(w, v)", "no product with values follows"),
}  # fmt: skip

# name: nodes and words of the reason
NEAR_MISSES = {
    # heads of the query in the order of the repeats, not of the heads that they read
    "five_dims_in_another_order": (f"""{GROUPS} single = Constant<value = int64[5] {{0, 0, 1, 2, 8}}>()
        kg = Reshape(a, single) vg = Reshape(b, single) kh = Transpose<perm = [0, 2, 3, 4, 1]>(kg)
        vh = Transpose<perm = [0, 2, 3, 1, 4]>(vg) s = MatMul(qh, kh) w = Softmax<axis = -1>(s) o5 = MatMul(w, vh)
        o4 = Transpose<perm = [0, 3, 1, 2, 4]>(o5) out = Reshape(o4, joined)""", "query and key are not known to have as many heads"),
    "scale_of_each_key": (f"m = MatMul(q, kt) s = Mul(m, pad) {TAIL}", '"s" (Mul) scales the scores by what is not a constant number, nor one for each row'),
    "scale_of_rows_behind_a_mask": (f"m = MatMul(q, kt) a = Add(m, bias) s = Mul(a, temperature) {TAIL}", "before what rows are multiplied by"),
    "scale_of_rows_behind_a_fill": (f"{FILL} m = MatMul(q, kt) a = Where(keep, m, inf) s = Mul(a, temperature) {TAIL}", "before what rows are multiplied by"),
    "scale_of_rows_behind_a_softcap": (f"m = MatMul(q, kt) t = Tanh(m) s = Mul(t, temperature) {TAIL}", '"t" (Tanh) between the products is not understood'),
    "scores_before_a_scale_of_rows": (f"scores = MatMul(q, kt) s = Mul(scores, temperature) {TAIL}", "is an output of the graph"),
    "number_before_softcap": (f"{SCALE} m = MatMul(q, kt) b = Add(m, c) t = Tanh(b) s = Mul(t, d) {TAIL}", "before the softcap"),
    "mask_of_windows_ahead_of_images": (f"""{WINDOWS} lead = Constant<value = int64[3] {{2, -1, 4}}>() i = Constant<value = int64[2] {{1, 2}}>()
        {IN_WINDOWS}""", 'the dims of the mask "mask" are not understood'),
    "softmax_over_queries": ("s = MatMul(q, kt) w = Softmax<axis = 2>(s) out = MatMul(w, v)", "runs over axis 2 of 4"),
    "scores_before_the_scale": (f"{SCALE} m = MatMul(q, kt) s = Mul(m, c) {TAIL} other = Relu(m)", 'is also read by "other" (Relu)'),
    "scores_returned_before_the_scale": (f"{SCALE} scores = MatMul(q, kt) s = Mul(scores, c) {TAIL}", "is an output of the graph"),
    "scores_and_weights_read": ("scores = MatMul(q, kt) weights = Softmax<axis = -1>(scores) out = MatMul(weights, v)", "is an output of the graph"),
    "scores_between_two_masks": (f"m = MatMul(q, kt) scores = Add(m, bias) s = Add(scores, pad) {TAIL}", "is an output of the graph"),
    "scores_hold_a_number": (f"{FILL} m = MatMul(q, kt) scores = Where(keep, m, lowest) w = Softmax<axis = -1>(scores) out = MatMul(w, v)", "in hidden places, where the operator has -inf"),
    "scores_are_shifted": (f"{FILL} one = Constant<value = float {{1.0}}>() m = MatMul(q, kt) scores = Add(m, one) w = Softmax<axis = -1>(scores) out = MatMul(w, v)", "is an output of the graph"),
    "mask_multiplied": (f"m = MatMul(q, kt) s = Mul(m, bias) {TAIL}", "by what is not a constant number"),
    "mask_multiplied_and_added": (f"{FILL} one = Constant<value = float {{1.0}}>() m = MatMul(q, kt) a = Mul(m, ones) r = Sub(one, ones) b = Mul(r, lowest) s = Add(a, b) {TAIL}", "by what is not a constant number"),
    "mask_of_booleans_added": (f"m = MatMul(q, kt) s = Add(m, keep) {TAIL}", "is bool and added, must be float"),
    "logsumexp_read": ("last = Constant<value = int64[1] {-1}>() s = MatMul(q, kt) l = ReduceLogSumExp<keepdims = 1>(s, last) z = Sub(s, l) w = Exp(z) out = MatMul(w, v) other = Relu(l)", '"l", of "l" (ReduceLogSumExp), is also read by "other"'),
    "mask_is_a_factor_of_weights": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Mul(z, ones) out = MatMul(w, v)", "no product with values"),
    "scores_transposed": (f"m = MatMul(k, qt) s = Transpose<perm = [0, 1, 3, 2]>(m) {TAIL}", "does not cancel"),
    "fill_too_small": (f"f = Constant<value = float {{-100.0}}>() m = MatMul(q, kt) s = Where(keep, m, f) {TAIL}", "must be -10000 or less"),
    "fill_beside_others": (f"f = Constant<value = float {{-10000.0}}>() m = MatMul(q, kt) a = Where(keep, m, f) s = Add(a, pad) {TAIL}", "would not be the same beside other masks"),
    "mask_made_of_the_scores": (f"m = MatMul(q, kt) a = Relu(m) b = Neg(a) s = Add(m, b) {TAIL}", 'it reads "b", which is made of "m", its own scores'),
    "values_made_of_the_scores": (f"m = MatMul(q, kt) a = MatMul(m, v) w = Softmax<axis = -1>(m) out = MatMul(w, a)", 'it reads "a", which is made of "m", its own scores'),
    "scores_added_to_themselves": (f"m = MatMul(q, kt) s = Add(m, m) {TAIL}", 'it reads "m", which it replaces'),
    "weights_by_integers": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) i = Cast<to = 7>(z) w = Cast<to = 1>(i) out = MatMul(w, v)", "no product with values"),
    "fill_not_constant": (f"m = MatMul(q, kt) s = Where(keep, m, temperature) {TAIL}", "which is no constant"),
    "mask_is_one_number_for_a_row": (f"i = Constant<value = int64[1] {{-1}}>() b = ReduceMax<keepdims = 1>(bias, i) m = MatMul(q, kt) s = Add(m, b) {TAIL}", "one number for all keys"),
    "mask_has_more_dims": ("i = Constant<value = int64[1] {0}>() b = Unsqueeze(bias, i) m = MatMul(q, kt) s = Add(m, b) w = Softmax<axis = -1>(s) out = MatMul(w, v)", "have 5 and 4 dims"),
    "mask_before_softcap": (f"{SCALE} m = MatMul(q, kt) b = Add(m, bias) t = Tanh(b) s = Mul(t, d) {TAIL}", "before the softcap"),
    "weights_on_the_right": ("s = MatMul(q, kt) w = Softmax<axis = -1>(s) out = MatMul(vt, w)", "does not sum over the keys"),
    "negative_scale": (f"m = MatMul(q, kt) s = Neg(m) {TAIL}", '"s" (Neg) between the products is not understood'),
    "scale_below_zero": (f"f = Constant<value = float {{-1.0}}>() m = MatMul(q, kt) s = Mul(m, f) {TAIL}", "the scale is -1"),
    "training_dropout": ("t = Constant<value = bool {1}>() r = Constant<value = float {0.5}>() s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Dropout(z, r, t) out = MatMul(w, v)", '"w" (Dropout) drops weights at random, and no backward'),
    "class_softmax": ("s = MatMul(q, kt) out = Softmax<axis = -1>(s)", "no product with values follows"),
    "additive": ("a = Tanh(q) s = Add(a, q) w = Softmax<axis = -1>(s) out = MatMul(w, kt)", "no product of queries and keys"),
    "pooled": (f"{SCALE} n = Constant<value = int64[2] {{32, 5}}>() f = Expand(c, n) a = MatMul(x, f) w = Softmax<axis = -1>(a) o4 = MatMul(w, x) out = Relu(o4)", "the operands of \"a\" (MatMul) have 3 and 2 dims"),
    "gate": (f"s = MatMul(q, kt) w = Softmax<axis = -1>(s) out = Mul(w, ones)", 'no product with values follows the softmax, but "out" (Mul)'),
    "weights_change": ("s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Relu(z) out = MatMul(w, v)", "no product with values"),
    "guard_by_another_mask": (f"""
        {FILL} last = Constant<value = int64[1] {{-1}}>() b = Where(keep, zero, inf) m = MatMul(q, kt) s = Add(m, b)
        top = ReduceMax<keepdims = 1>(bias, last) g = Equal(top, inf) z = Softmax<axis = -1>(s) w = Where(g, zero, z)
        out = MatMul(w, v)""", "by what is no mask of the scores"),
    "weights_rounded": (f"{GRID} s = MatMul(q, kt) z = Softmax<axis = -1>(s) g = QuantizeLinear(z, grid, none) w = DequantizeLinear(g, grid, none) out = MatMul(w, v)", 'the weights are rounded to integers by "g" (QuantizeLinear)'),
    "scores_rounded": (f"{GRID} m = MatMul(q, kt) g = QuantizeLinear(m, grid, none) s = DequantizeLinear(g, grid, none) {TAIL}", '"g" (QuantizeLinear) rounds the scores'),
    "scores_of_integers": (f"{GRID} a = QuantizeLinear(q, grid, none) b = QuantizeLinear(kt, grid, none) m = MatMulInteger(a, b, none, none) f = Cast<to = 1>(m) s = Mul(f, grid) {TAIL}", '"m" (MatMulInteger) rounds the scores'),
    "guard_of_other_rows": (f"{FILL} n = IsNaN(bias) s = MatMul(q, kt) z = Softmax<axis = -1>(s) w = Where(n, zero, z) out = MatMul(w, v)", "no product with values"),
}  # fmt: skip
