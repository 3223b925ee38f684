//! The arithmetic that every backend is held to, as scalar formulas.
//!
//! Everything here is FP32 with explicit fused multiply-adds and fixed orders of summation; nothing depends on
//! the instruction set, the number of threads, or how many rows a step has. `docs/numerics.md` gives the reasons.
//!
//! A dot product keeps [`LANES`] partial sums and folds them by halves. Which element goes to which lane is part
//! of the rule: for FP16, FP32 and q8 weights element `i` goes to lane `i % 16`; for packed codes, where one 32-bit
//! word holds eight neighbours, element `i` goes to lane `(i % 128) / 8`. Within a lane elements are taken in
//! ascending order.

use half::f16;
use rayon::prelude::*;

use crate::dense_q8;
use crate::qpacked::BlockSize;

/// Partial sums of a dot product.
pub const LANES: usize = 16;
/// Elements that one group of packed words covers: eight codes a word, one word a lane.
pub const CODE_GROUP: usize = 8 * LANES;

/// Sum of the lanes: lane `l` with `l + 8`, then with `l + 4`, `l + 2`, `l + 1`.
#[must_use]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ w·x` of FP16 weights.
///
/// # Panics
/// When the lengths differ.
#[must_use]
pub fn dot_f16(w: &[f16], x: &[f32]) -> f32 {
    dot_by(w.len(), x, |i| w[i].to_f32())
}

/// `Σ w·x` of one q8 row: `scales` holds one FP16 scale a block of [`BLOCK`](dense_q8::BLOCK), `w = f32(d) * q`.
///
/// # Panics
/// When `codes` and `x` differ in length, or `scales` is shorter than they ask for.
#[must_use]
pub fn dot_q8(codes: &[i8], scales: &[f16], x: &[f32]) -> f32 {
    dot_by(codes.len(), x, |i| {
        scales[i / dense_q8::BLOCK].to_f32() * f32::from(codes[i])
    })
}

/// `Σ w·x` of FP32 values.
///
/// # Panics
/// When the lengths differ.
#[must_use]
pub fn dot_f32(w: &[f32], x: &[f32]) -> f32 {
    dot_by(w.len(), x, |i| w[i])
}

fn dot_by(n: usize, x: &[f32], w: impl Fn(usize) -> f32) -> f32 {
    assert_eq!(n, x.len(), "a row and its input differ in length");
    let mut lanes = [0.0; LANES];
    for (i, x) in x.iter().enumerate() {
        lanes[i % LANES] = w(i).mul_add(*x, lanes[i % LANES]);
    }
    fold(lanes)
}

/// `Σ w·x` of one packed row: `codes` holds two codes a byte, `scales` one FP16 scale a block, `w = f32(d) * q`.
///
/// # Panics
/// When `codes` or `scales` are shorter than `x` asks for.
#[must_use]
pub fn dot_qpacked(codes: &[u8], scales: &[f16], block: BlockSize, x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (i, x) in x.iter().enumerate() {
        let q = f32::from((codes[i / 2] >> (4 * (i % 2))) & 15) - 8.0;
        let w = scales[i / block.get()].to_f32() * q;
        let lane = &mut lanes[i % CODE_GROUP / 8];
        *lane = w.mul_add(*x, *lane);
    }
    fold(lanes)
}

/// Rounds a row to 16-bit integers with one FP32 scale a group of 128: `x ≈ scale · v`, `scale = max|x| / 32767`,
/// `v` rounded to nearest, ties to even. A group with a NaN or an infinity gets the scale NaN.
///
/// # Panics
/// When `values` is not as long as `x`, or `scales` does not have one element a group.
pub fn to_integers(x: &[f32], values: &mut [i16], scales: &mut [f32]) {
    assert!(
        x.len() == values.len() && scales.len() == x.len().div_ceil(CODE_GROUP),
        "lengths of an integer row"
    );
    let groups = x.chunks(CODE_GROUP).zip(values.chunks_mut(CODE_GROUP));
    for ((x, values), scale) in groups.zip(scales) {
        let max = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let finite = x.iter().all(|v| v.is_finite());
        *scale = if finite { max / 32767.0 } else { f32::NAN };
        let inverse = if *scale > 0.0 { 1.0 / *scale } else { 0.0 };
        for (v, x) in values.iter_mut().zip(x) {
            #[expect(
                clippy::cast_possible_truncation,
                reason = "clamped to the range of i16; NaN becomes 0"
            )]
            let rounded = (x * inverse).round_ties_even().clamp(-32767.0, 32767.0) as i16;
            *v = rounded;
        }
    }
}

/// `Σ w·x` of one packed row and one row of [`to_integers`]: the eight neighbours of a word are summed as integers,
/// exactly, then one fused multiply-add by `f32(d) · scale` (rounded once) adds them to the word's lane.
///
/// # Panics
/// When `codes` or `scales` are shorter than `x` asks for.
#[must_use]
pub fn dot_qpacked_integers(
    codes: &[u8],
    scales: &[f16],
    block: BlockSize,
    x: &[i16],
    x_scales: &[f32],
) -> f32 {
    let mut lanes = [0.0; LANES];
    for (word, x) in x.chunks(8).enumerate() {
        let code = |i: usize| i32::from((codes[i / 2] >> (4 * (i % 2))) & 15) - 8;
        let sum: i32 = (8 * word..).zip(x).map(|(i, x)| code(i) * i32::from(*x)).sum();
        let factor = scales[8 * word / block.get()].to_f32() * x_scales[8 * word / CODE_GROUP];
        let lane = &mut lanes[word % LANES];
        #[expect(clippy::cast_precision_loss, reason = "below 2^24: exact")]
        let sum = sum as f32;
        *lane = factor.mul_add(sum, *lane);
    }
    fold(lanes)
}

/// Rounds each value to FP16 (nearest, ties to even) and back: what a matrix product of FP16 activations reads.
pub fn narrow(x: &mut [f32]) {
    for v in x {
        *v = f16::from_f32(*v).to_f32();
    }
}

/// `x / sqrt(mean(x²) + eps) * weight`, the mean in the order of [`dot_f32`].
///
/// # Panics
/// When the lengths differ.
pub fn rms_norm(x: &[f32], weight: &[f16], eps: f32, out: &mut [f32]) {
    assert!(
        x.len() == weight.len() && x.len() == out.len(),
        "a norm's row, weight and output differ in length"
    );
    #[expect(clippy::cast_precision_loss, reason = "widths are below 2^24")]
    let mean = dot_f32(x, x) / x.len() as f32;
    let inverse = 1.0 / (mean + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * inverse * w.to_f32();
    }
}

/// Turns scores into probabilities in place: `exp(x - max) / Σ`, the sum over lanes `i % 16`.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut lanes = [0.0; LANES];
    for (i, v) in x.iter_mut().enumerate() {
        *v = libm::expf(*v - max);
        lanes[i % LANES] += *v;
    }
    let sum = fold(lanes);
    for v in x {
        *v /= sum;
    }
}

/// `1 / (1 + exp(-x))`.
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + libm::expf(-x))
}

/// `x * sigmoid(x)`, as `x / (1 + exp(-x))`.
#[must_use]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + libm::expf(-x))
}

/// Chosen experts and their weights, in ranking order.
#[derive(Clone, Debug, PartialEq)]
pub struct Routing {
    /// Expert ids by falling probability, ties to the lowest id.
    pub experts: Vec<u32>,
    /// What multiplies each expert's output.
    pub weights: Vec<f32>,
}

/// Softmax over all experts, then the `top_k` largest, then division by their sum (in ranking order) if asked.
///
/// # Panics
/// When `top_k` exceeds the number of experts.
#[must_use]
pub fn route(logits: &[f32], top_k: usize, renormalize: bool) -> Routing {
    let mut probabilities = logits.to_vec();
    softmax(&mut probabilities);
    let mut order: Vec<u32> = (0u32..).take(logits.len()).collect();
    order.sort_by(|a, b| {
        probabilities[*b as usize]
            .total_cmp(&probabilities[*a as usize])
            .then(a.cmp(b))
    });
    order.truncate(top_k);
    assert_eq!(order.len(), top_k, "more experts asked for than there are");
    let mut weights: Vec<f32> = order.iter().map(|e| probabilities[*e as usize]).collect();
    if renormalize {
        let sum: f32 = weights.iter().sum();
        for w in &mut weights {
            *w /= sum;
        }
    }
    Routing {
        experts: order,
        weights,
    }
}

/// Position of the largest value, ties to the lowest index; NaN is never the largest.
#[must_use]
pub fn argmax(x: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (i, v) in (0u32..).zip(x) {
        if *v > best.1 {
            best = (i, *v);
        }
    }
    best.0
}

/// Cosines and sines of the rotary positions.
#[derive(Debug)]
pub struct RotaryTable {
    half: usize,
    /// `[context][half]` pairs (cosine, sine).
    pairs: Vec<(f32, f32)>,
}

impl RotaryTable {
    /// Angles `position * theta^(-2i / head_dim)`: frequency and product rounded to FP32 as the checkpoints were
    /// trained with, the functions evaluated in FP64 and rounded once.
    #[must_use]
    pub fn new(context: usize, head_dim: usize, theta: f64) -> Self {
        let half = head_dim / 2;
        #[expect(clippy::cast_precision_loss, reason = "widths and positions are below 2^24")]
        #[expect(clippy::cast_possible_truncation, reason = "rounding to FP32 is the rule")]
        let frequencies: Vec<f32> = (0..half)
            .map(|i| libm::pow(theta, -2.0 * i as f64 / head_dim as f64) as f32)
            .collect();
        let mut pairs = vec![(0.0, 0.0); context * half];
        pairs
            .par_chunks_exact_mut(half)
            .enumerate()
            .with_min_len(64)
            .for_each(|(p, pairs)| {
                for (pair, frequency) in pairs.iter_mut().zip(&frequencies) {
                    #[expect(clippy::cast_precision_loss, reason = "positions are below 2^24")]
                    let angle = f64::from(p as f32 * frequency);
                    #[expect(clippy::cast_possible_truncation, reason = "rounding to FP32 is the rule")]
                    let rounded = (libm::cos(angle) as f32, libm::sin(angle) as f32);
                    *pair = rounded;
                }
            });
        Self { half, pairs }
    }

    /// Bytes of a table for `context` positions of heads `head_dim` wide.
    #[must_use]
    pub fn bytes(context: usize, head_dim: usize) -> usize {
        context * (head_dim / 2) * size_of::<(f32, f32)>()
    }

    /// `[context][head_dim / 2]` pairs (cosine, sine).
    #[must_use]
    pub fn pairs(&self) -> &[(f32, f32)] {
        &self.pairs
    }

    /// Rotates one head: `(a, b)` becomes `(a·cos − b·sin, b·cos + a·sin)` for the halves `a` and `b`.
    ///
    /// # Panics
    /// When `position` is outside the table or `head` is not one head wide.
    pub fn rotate(&self, position: usize, head: &mut [f32]) {
        assert_eq!(head.len(), 2 * self.half, "a head of another width");
        let (a, b) = head.split_at_mut(self.half);
        let pairs = &self.pairs[position * self.half..][..self.half];
        for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(pairs) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_fold_by_halves() {
        let mut lanes = [0.0f32; LANES];
        // 2^24 + 1 is lost unless the 1 meets another 1 first: lanes 7 and 15 are added before lane 0 joins.
        lanes[0] = 16_777_216.0;
        lanes[7] = 1.0;
        lanes[15] = 1.0;
        assert_eq!(fold(lanes), 16_777_218.0);
    }

    #[test]
    fn packed_dot_forms_each_weight_exactly() {
        let d = f16::from_f32(-0.25);
        // codes 0..16 are q = -8..8 without 8
        let codes: Vec<u8> = (0..8).map(|i| (2 * i) | ((2 * i + 1) << 4)).collect();
        let x: Vec<f32> = (0..16u8).map(f32::from).collect();
        let want: f32 = (0..16u8)
            .map(|i| -0.25 * (f32::from(i) - 8.0) * f32::from(i))
            .sum();
        assert_eq!(dot_qpacked(&codes, &[d], BlockSize::B32, &x), want);
    }

    #[test]
    fn q8_dot_forms_each_weight_exactly_in_the_order_of_fp16() {
        let (codes, x): (Vec<i8>, Vec<f32>) = (0..70i8).map(|i| (i - 35, f32::from(i) / 7.0)).unzip();
        let scales = [0.25, -1.5, 0.0625].map(f16::from_f32);
        // All weights are FP16 values here: the FP16 product is the same sum.
        let w: Vec<f16> = (0..70)
            .map(|i| f16::from_f32(scales[i / 32].to_f32() * f32::from(codes[i])))
            .collect();
        assert_eq!(dot_q8(&codes, &scales, &x).to_bits(), dot_f16(&w, &x).to_bits());
    }

    #[test]
    fn an_integer_row_is_close_and_a_nan_spreads() {
        let x: Vec<f32> = (0..200u8).map(|i| (f32::from(i) - 90.0) * 0.37).collect();
        let (mut v, mut s) = (vec![0i16; 200], vec![0.0; 2]);
        to_integers(&x, &mut v, &mut s);
        for (i, (x, v)) in x.iter().zip(&v).enumerate() {
            assert!((x - f32::from(*v) * s[i / 128]).abs() <= s[i / 128] * 0.500_1);
        }
        assert_eq!(v[0], -32767, "the largest of a group keeps its place");
        to_integers(&[0.0; 8], &mut v[..8], &mut s[..1]);
        assert_eq!((&v[..8], s[0]), (&[0i16; 8][..], 0.0));
        to_integers(
            &[1.0, f32::INFINITY, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0],
            &mut v[..8],
            &mut s[..1],
        );
        let codes = [0x79; 4];
        assert!(dot_qpacked_integers(&codes, &[f16::ONE], BlockSize::B32, &v[..8], &s[..1]).is_nan());
    }

    #[test]
    fn ties_go_to_the_lowest_expert() {
        let r = route(&[1.0, 3.0, 3.0, 0.0, 3.0], 4, true);
        assert_eq!(r.experts, [1, 2, 4, 0]);
        assert_eq!(r.weights[0], r.weights[2]);
        assert!((r.weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(route(&[0.0; 6], 3, false).experts, [0, 1, 2]);
        assert_eq!(argmax(&[f32::NAN, 2.0, 2.0]), 1);
    }

    #[test]
    fn rotation_turns_halves_not_neighbours() {
        let t = RotaryTable::new(3, 4, 1e4);
        let mut head = [1.0, 0.0, 0.0, 0.0];
        t.rotate(2, &mut head);
        assert!((head[0] - 2f32.cos()).abs() < 1e-6 && (head[2] - 2f32.sin()).abs() < 1e-6);
        assert_eq!((head[1], head[3]), (0.0, 0.0));
    }
}
