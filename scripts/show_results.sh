#!/usr/bin/env bash
# Prints the finished table and where the rest is. Usage: show_results.sh RESULTS_DIR
set -euo pipefail
results=$1
[[ -f $results/tables/speedup.md ]] || exit 0 # a run that was asked for something else
echo
cat "$results/tables/speedup.md"
echo
echo "table    $results/tables/speedup.csv"
echo "figure   $results/figures/acceptance_length.png"
echo "report   $results/report.html"
