#!/usr/bin/env bash
# What only a GPU can tell of the CUDA kernels, in stages; each says what it does, and what it leaves out and why.
#
#   bench/cuda.sh [STAGE...]       all of them, in this order: machine build instructions cases sanitizer python speed model
#
# nvcc builds everything into build/cuda and build/cuda_venv; without a GPU it goes as far as it can. Tables are written to
# bench/results, to be committed with the GPU's name and the date. Exit code 1: something failed.
# shellcheck disable=SC2329  # functions are called by the names of the stages
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

venv=build/cuda_venv
logs=build/logs
failed=0
mkdir -p $logs

say() { printf '%s\n' "$*"; }
leave_out() { say "   left out: $*"; }

# stage NAME TITLE
stage() {
  local name=$1 start=$SECONDS
  say "== $name: $2"
  if "stage_$name"; then say "   done, $((SECONDS - start)) s"; else failed=1 && say "   FAILED, $((SECONDS - start)) s"; fi
}

# logged NAME COMMAND...: the end of its output is shown if it fails
logged() {
  local log=$logs/cuda-$1.log
  shift
  "$@" >"$log" 2>&1 && return
  tail -n 30 "$log"
  say "   failed: $* (whole output: $log)"
  return 1
}

# Why the GPU cannot be used; nothing if it can.
why_no_gpu() {
  command -v nvidia-smi >/dev/null || { say "nvidia-smi is not there, so no driver" && return; }
  nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1 || say "nvidia-smi finds no GPU"
}

stage_machine() {
  local why
  why=$(why_no_gpu)
  if [[ -n $why ]]; then leave_out "$why"; else
    nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version --format=csv
  fi
  if command -v nvcc >/dev/null; then nvcc --version | tail -n 2; else leave_out "nvcc is not there"; fi
}

on_device_tests=(cuda_attention_test_on_device cuda_formats_test_on_device cuda_out_dtype_test_on_device
  cuda_program_test_on_device cuda_linear_test_on_device cuda_norm_test_on_device cuda_rows_test_on_device
  cuda_gradient_test_on_device cuda_random_test_on_device
  cuda_gradient_random_test_on_device cuda_small_test_on_device ptx_instructions_test_on_device ptx_random_test
  ptx_warpgroup_test_on_device)
layer_tests=(cuda_layer_test_on_device cuda_layer_attention_block_test_on_device cuda_layer_cache_test_on_device
  cuda_layer_feed_forward_test_on_device)

stage_build() {
  command -v nvcc >/dev/null || { leave_out "nvcc is not there" && return; }
  logged configure cmake --preset cuda && logged build cmake --build --preset cuda --target "${on_device_tests[@]}" "${layer_tests[@]}"
}

# program NAME: its path, if it was built
program() { [[ -x build/cuda/tests/$1 ]] && say "build/cuda/tests/$1"; }

stage_instructions() {
  local test status=0 folder
  program ptx_random_test >/dev/null || { leave_out "the stage build has not made ptx_random_test" && return; }
  folder=$(mktemp -d)
  say "   each on random operands: interpreter and GPU; without a GPU the interpreter alone"
  POLYHEAD_PTX=$folder "$(program ptx_random_test)" | grep -E 'Skipped|instructions|FAILED|interpreter|OK|PASSED' || status=1
  if command -v ptxas >/dev/null; then
    say "   their PTX through ptxas: $(find "$folder" -name '*.ptx' | wc -l) kernels"
    for test in "$folder"/*.ptx; do
      ptxas -arch=sm_80 "$test" -o /dev/null >>"$folder/said" 2>&1 || { status=1 && tail -n 3 "$folder/said" "$test"; }
    done
  else
    leave_out "ptxas is not there"
  fi
  say "   each against its documented result, on the GPU"
  for test in ptx_instructions_test_on_device ptx_warpgroup_test_on_device; do
    "$(program "$test")" --gtest_brief=1 | tail -n 12 || status=1
  done
  rm -r "$folder"
  return "$status"
}

# on_gpu NAME: whether the program is there and a GPU too
on_gpu() {
  local why
  why=$(why_no_gpu)
  [[ -z $why ]] || { leave_out "$why" && return 1; }
  program "$1" >/dev/null || { leave_out "the stage build has not made $1" && return 1; }
}

stage_cases() {
  local test status=0
  on_gpu cuda_attention_test_on_device || return 0
  export POLYHEAD_TEST_KERNEL=cuda_sm80_on_host
  for test in cuda_small_test_on_device cuda_attention_test_on_device cuda_gradient_test_on_device cuda_formats_test_on_device \
    cuda_out_dtype_test_on_device cuda_program_test_on_device cuda_linear_test_on_device cuda_norm_test_on_device \
    cuda_rows_test_on_device; do
    logged "$test" "$(program "$test")" --gtest_brief=1 || status=1
    tail -n 3 "$logs/cuda-$test.log"
  done
  for test in cuda_random_test_on_device cuda_gradient_random_test_on_device; do
    POLYHEAD_RANDOM_PROBLEMS=2000 logged "$test" "$(program "$test")" --gtest_brief=1 || status=1
    tail -n 3 "$logs/cuda-$test.log"
  done
  for test in "${layer_tests[@]}"; do
    POLYHEAD_TEST_KERNEL=cuda_sm80 logged "$test" "$(program "$test")" --gtest_brief=1 \
      --gtest_filter='*EveryKernel*:*OnCache.*:*Block.SharedKeys*:Layer.ForwardAndBackward*:Layer.Padding*:Layer.Steps*:Layer.WeightGradients*' || status=1
    tail -n 3 "$logs/cuda-$test.log"
  done
  return "$status"
}

# Cases of each kind that are small: the tools take hundreds of times as long.
sanitized='*/gqa_f16:*/causal_bf16_66x66:*/seqlens_bf16:*/window_f16:*/head_dim_128_f16:*/everything_bf16:*/head_dim_7_f32'
sanitized+=':*/pages_packed_f16:*/packed_causal_f16:*/everything_decode_bf16:*/everything_wide_f32'

stage_sanitizer() {
  local tool test status=0
  on_gpu cuda_attention_test_on_device || return 0
  command -v compute-sanitizer >/dev/null || { leave_out "compute-sanitizer is not there" && return; }
  export POLYHEAD_TEST_KERNEL=cuda_sm80_on_host
  for tool in memcheck racecheck initcheck synccheck; do
    for test in cuda_attention_test_on_device cuda_gradient_test_on_device; do
      logged "$tool-$test" compute-sanitizer --tool "$tool" --error-exitcode 1 "$(program "$test")" --gtest_brief=1 \
        --gtest_filter="$sanitized" || status=1
      say "   $tool, $test: $(grep -c 'ERROR SUMMARY: 0 errors' "$logs/cuda-$tool-$test.log") clean summary"
    done
  done
  return "$status"
}

stage_python() {
  local why
  why=$(why_no_gpu)
  [[ -z $why ]] || { leave_out "$why" && return; }
  logged venv python3 -m venv "$venv" && logged torch "$venv"/bin/pip install torch numpy pytest &&
    logged wheel "$venv"/bin/pip install . -C cmake.define.POLYHEAD_CUDA=ON -C build-dir=build/python_cuda || return
  "$venv"/bin/python -m polyhead info && logged pytest "$venv"/bin/python -m pytest -q tests/python/cuda_device_test.py
}

stage_speed() {
  local why
  why=$(why_no_gpu)
  [[ -z $why ]] || { leave_out "$why" && return; }
  [[ -x $venv/bin/python ]] || { leave_out "the stage python has not made $venv" && return; }
  "$venv"/bin/python bench/cuda_peers.py --out bench/results && "$venv"/bin/python bench/cuda_options.py --out bench/results
}

# By count alone: no GPU is asked.
stage_model() {
  local nvdisasm build=build/release/tests
  nvdisasm=$(command -v nvdisasm) || { leave_out "nvdisasm is not there (PyPI: nvidia-cuda-nvdisasm)" && return; }
  command -v nvcc >/dev/null || { leave_out "nvcc is not there" && return; }
  logged model-configure cmake --preset release && logged model-build cmake --build --preset release --target cuda_tile_counts &&
    python3 bench/cuda_model.py --objects "$build/cuda" --counts "$build/cuda_tile_counts" --nvdisasm "$nvdisasm" --out bench/results
}

declare -A titles=(
  [machine]="which GPU, driver and compiler"
  [build]="kernels for every architecture, and the tests that run them"
  [instructions]="what a GPU makes of each PTX instruction, against the interpreter"
  [cases]="the CPU kernels' list of cases, forward and gradients, and random problems, on the GPU"
  [sanitizer]="compute-sanitizer: memory, races, uninitialised memory, barriers"
  [python]="the wheel with CUDA kernels, beside torch for CUDA"
  [speed]="TFLOP/s beside torch's backends"
  [model]="the model of speed, by count"
)
order=(machine build instructions cases sanitizer python speed model)
chosen=("${@:-${order[@]}}")
[[ $# -gt 0 ]] || chosen=("${order[@]}")
for name in "${chosen[@]}"; do
  [[ -n ${titles[$name]:-} ]] || { say "bench/cuda.sh: no stage $name; there are ${order[*]}" >&2 && exit 2; }
done
for name in "${chosen[@]}"; do stage "$name" "${titles[$name]}"; done
exit $failed
