#!/bin/sh
# pkg_config.sh PREFIX OUTPUT COMPILER [OPTION...]: builds consumer.c against the polyhead in PREFIX by what pkg-config
# says, as a C program with a C compiler, and runs it.
set -eu
prefix=$1 output=$2
shift 2
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name polyhead.pc)")
export PKG_CONFIG_PATH
case $(pkg-config --variable=prefix polyhead) in
  "$prefix"*) ;;
  *) echo "pkg-config names another prefix: $(pkg-config --variable=prefix polyhead)" >&2; exit 1 ;;
esac
mkdir -p "$(dirname "$output")"
# shellcheck disable=SC2046  # options are words
"$@" -std=c99 -pedantic -Wall -Wextra -Werror $(pkg-config --cflags polyhead) "$(dirname "$0")/consumer.c" -o "$output" \
  $(pkg-config --libs polyhead)
LD_LIBRARY_PATH=$(pkg-config --variable=libdir polyhead) "$output"
