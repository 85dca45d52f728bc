#pragma once

// Judges a result. The error bounds follow from the dtype and the numbers of the problem; there is
// nothing to tune. For one row and head, with n keys that it may see, of size D, scores s_j,
// softmax weights p_j, output o = Σ p_j·v_j and W = Σ p_j·|v_j| (which the oracle computes
// exactly):
//
//   u    2⁻²⁴, the unit roundoff of float32, in which contract 11 wants all sums
//   u_t  that of the query's dtype t, and u_o that of the output's
//   N(k) = min(k, 32·√k): a sum of k terms is off by less than N(k)·u·Σ|terms|. Up to 1024 terms
//        that is the worst case in any order of adding; beyond, the bound that holds with near
//        certainty when roundings are independent (Higham and Mary, 2019)
//
//   u_w  that of the weights, which are rounded to the query's dtype for the product with V: u_t,
//        but 2⁻⁸ where the query is fp8, for weights then have 16 bits; 0 for f32
//   A    |scale|·‖q‖·max‖k_j‖ ≥ |scale|·Σ|q_d·k_d|, by Cauchy and Schwarz
//   B    what is added to scores: the largest |ALiBi bias|, |sink|; with a score_mod A again, for
//        it is unknown (it must neither amplify errors nor be much larger than what it gets)
//   δ    = u·(N(D)·A + 8·(A + B + 1)): error of a score and its exponential. The products are
//        summed in float32; scaling, cap, bias, the change to base 2 and the subtraction of the
//        maximum round a few times more, each relative to at most A + B. Where the query is fp8
//        2⁻¹³·⌈D/32⌉·A more: the instructions of sm_90 add 32 products at a time, in 14 bits
//
//   LSE:    δ + u·(N(n) + 8) + 4u·|lse|
//   output: u_o·|o|                final rounding; half the smallest subnormal where that is more
//         + u_w·W                  weights
//         + 2·(e^δ − 1)·W          errors of the scores, in numerator and denominator
//         + u·(2·N(n) + 16)·W      both sums, the exponential, the division, merging of splits
//
// Where a file expects numbers for inputs that the dtype had to round, each input is off by u_t:
// the score by 2·u_t·A more, the output by u_t·W. Nobody's row, or one that sees nothing, must be
// exactly 0 and −inf.
//
// Equal numbers, infinities and NaNs are right whatever the bound; different ones are wrong where
// the bound is not finite.

#include <cstdint>
#include <string>
#include <vector>

#include "problem/problem.h"
#include "problem/run.h"

namespace foveal::problem {

/// What must come out, and how far off it may be, in the shapes of RunResult.
struct Solution {
  std::vector<double> output;
  std::vector<double> lse;
  std::vector<double> output_bound;
  std::vector<double> lse_bound;
};

/// The exact result, by REFERENCE in float64 on plain keys and values: neither paging, scales nor
/// cascade has a part in it.
Solution solve(const AttentionProblem& problem);

/// What the file expects, where it does, instead of `exact`; with the same bounds.
Solution expected_by_file(const AttentionProblem& problem, const Solution& exact);

struct Comparison {
  bool passed = true;
  /// The worst differences, by request, row, head and dimension, and everything that was
  /// overwritten.
  std::string message;
  /// The largest error of output, and the bound where error / bound is largest.
  double max_error = 0.0;
  double bound = 0.0;
  double max_lse_error = 0.0;
};

/// Compares with bounds `factor` times as wide.
Comparison compare(const AttentionProblem& problem, const RunResult& result,
                   const Solution& expected, double factor = 1.0);

}  // namespace foveal::problem
