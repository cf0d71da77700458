/* A C user's program: attention of 1 query on 2 keys that score the same, so that out is the mean of the values. */
#include <polyhead/polyhead.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  const int64_t one_row[] = {1, 1, 1, 4}, two_rows[] = {1, 2, 1, 4};
  const float query[4] = {0}, key[8] = {0}, value[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float out[4] = {0};
  polyhead_attention_desc desc;
  polyhead_forward_args args;
  polyhead_attention_plan* plan = NULL;
  polyhead_status status = polyhead_check_abi(POLYHEAD_ABI_VERSION);
  if (status == POLYHEAD_OK) status = polyhead_attention_desc_init(&desc, sizeof desc);
  if (status == POLYHEAD_OK) status = polyhead_forward_args_init(&args, sizeof args);
  if (status != POLYHEAD_OK) return puts(polyhead_last_error()), 1;
  desc.seqlen_q = 1;
  desc.seqlen_k = 2;
  desc.head_dim = desc.head_dim_v = 4;
  status = polyhead_attention_plan_create(&desc, NULL, &plan);
  if (status != POLYHEAD_OK) return puts(polyhead_last_error()), 1;
  args.query = polyhead_tensor_contiguous(query, POLYHEAD_FLOAT32, 4, one_row);
  args.key = polyhead_tensor_contiguous(key, POLYHEAD_FLOAT32, 4, two_rows);
  args.value = polyhead_tensor_contiguous(value, POLYHEAD_FLOAT32, 4, two_rows);
  args.out = polyhead_tensor_contiguous(out, POLYHEAD_FLOAT32, 4, one_row);
  args.workspace_bytes = polyhead_attention_plan_workspace_bytes(plan);
  void* memory = malloc(args.workspace_bytes + 64);
  args.workspace = (char*)memory + (64 - (uintptr_t)memory % 64) % 64;
  status = polyhead_attention_forward(plan, &args);
  printf("polyhead %s, %s: %g %g %g %g %s\n", polyhead_version(), polyhead_attention_plan_kernel_name(plan), out[0],
         out[1], out[2], out[3], polyhead_last_error());
  polyhead_attention_plan_destroy(plan);
  free(memory);
  return status == POLYHEAD_OK && out[0] == 3 && out[3] == 6 ? 0 : 1;
}
