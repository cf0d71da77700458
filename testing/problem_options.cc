// The options of a problem, as help texts list them.
#include "testing/problem_words.h"

namespace polyhead::testing {

std::span<const ProblemOption> problem_options() {
  static constexpr ProblemOption kOptions[] = {
      {"--dtype", "T", "f32 (default), bf16, f16 or f64"},
      {"--out-dtype", "T", "of out: that of --dtype (default), or f32 beside bf16 and f16"},
      {"--grad-dtype", "T", "of the gradients of query, key and value, likewise"},
      {"--key-dtype", "T", "of keys as a cache stores them: int8, e4m3, e5m2 or int4; that of --dtype (default)"},
      {"--key-group", "N", "how many elements of a key share a scale; 0: all"},
      {"--value-dtype", "T", "of values likewise"},
      {"--value-group", "N", "of values likewise"},
      {"--causal", "[=1]", "query i sees key j <= i + offset"},
      {"--window", "L,R", "i + offset - L <= j <= i + offset + R; -1 is open"},
      {"--sink-keys", "N", "keys j < N are seen whatever the window's left side says"},
      {"--mask-at-end", "[=1]", "--mask tells of the last keys of each sequence alone, as many as its last dim"},
      {"--align", "A", "top_left (offset 0) or bottom_right (seqlen_k - seqlen_q)"},
      {"--query-offset", "N", "the offset itself, or 'random': one per sequence"},
      {"--scale", "X", "factor on the scores (default 1 / sqrt(head_dim))"},
      {"--softcap", "X", "X * tanh(score / X)"},
      {"--alibi", "[=head]", "ALiBi slopes per head, or =batch: per sequence and head"},
      {"--sinks", "[=1]", "sink_logits: one more logit of each row of a head, without a value"},
      {"--normalizer", "N", "softmax (default) or none: the weights are the scores"},
      {"--mask", "DIMS[:KIND]", "boolean mask, DIMS as b,h,q,k or sizes, 1 to broadcast; KIND random, padding, blocks"},
      {"--score", "TEXT", "a score program, as 'score - slope[h] * abs(q - k)'; docs/programs.md has the language"},
      {"--mask", "TEXT", "a mask program, as 'k <= q and q < lts[b, k]'"},
      {"--captured", "TENSORS",
       "what the programs read, drawn at random: 'slope: f32[h]; lts: i32[b, k] 0..512; doc: i64[q] 0..7 rising'"},
      {"--bias", "DIMS", "additive bias, DIMS likewise"},
      {"--bias-dtype", "T", "f32 (default), bf16, f16 or f64"},
      {"--lengths", "[=both]", "random seqlens_q, seqlens_k per sequence: both, q or k"},
      {"--page-size", "N", "keys and values in pages of N keys, at random places of a pool; with --lengths; 0: none"},
      {"--windows", "[=1]", "random window_lo and window_hi per query"},
      {"--packed", "[=1]",
       "sequences of random lengths without padding (cu_seqlens); =rows: SQ and SK rows, cut at random"},
      {"--dropout", "P", "probability of dropping a weight"},
      {"--dropout-origin", "H0,H,Q0,K0",
       "of a shard: its first head, heads in all, first query and key (default 0,0,0,0)"},
      {"--weights", "W", "return the weights: head or mean"},
      {"--column-sums", "[=1]", "return the weights' sums over the queries"},
      {"--logsumexp", "[=1]", "return log sum exp of the scores; backward: its gradient comes in"},
      {"--needs", "LIST", "gradients, as query,key,value or attn_bias,sink_logits,captured (default: all there are)"},
      {"--accumulate", "[=1]", "backward adds to what the gradients hold"},
      {"--delta", "[=1]", "backward is given the row sums of grad_out * out instead of out"},
      {"--repeat-grad-out", "BITS", "grad_out holds one value along dim n if bit n is set (default 0)"},
      {"--fill", "F", "numbers: normal (default), shift_up, shift_down, large, underflow, outliers"},
      {"--edges", "[=1]", "operands as tests like them: hidden rows and tails, lengths, slopes and windows of 0"},
      {"--layout", "L[:SEED]",
       "bshd (default), bhsd, sbhd, qkv (one row per token), strided (gaps), transposed, padded, junk, negative, "
       "expanded or mixed"},
      {"--seed", "N", "of the random operands and of dropout (default 1)"},
  };
  return kOptions;
}

}  // namespace polyhead::testing
