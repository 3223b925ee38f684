//! From logits to a token: repetition penalty, temperature, top-k, top-p, min-p, then one draw.
//!
//! The steps, their order and their boundary cases are those of Hugging Face's `generate`:
//!
//! 1. *Repetition penalty*: the logit of every token of the prompt or of the answer so far is divided by the
//!    penalty when positive and multiplied by it when negative.
//! 2. *Temperature*: all logits are divided by it. A temperature of 0 is greedy choice, as is [`Sampling::greedy`].
//! 3. *Top-k*: logits below the k-th largest are dropped (several tokens that tie with the k-th all stay).
//! 4. *Top-p*: walking up from the least likely token, tokens are dropped while the probability passed so far,
//!    their own included, is at most 1 − p. The most likely token always stays.
//! 5. *Min-p*: tokens less likely than p times the most likely one are dropped.
//!
//! Greedy choice applies the penalty only. Ties go to the lowest token id everywhere.
//!
//! **Reproducible.** The generator is PCG-64 (`rand_pcg::Pcg64`, a value-stable generator) seeded by
//! `seed_from_u64`; one 64-bit number is drawn for each sampled token. Probabilities are formed in FP64 with
//! the software `exp` of the `libm` crate and summed in order of token id. So one seed gives one text wherever
//! the logits are the same bits, whatever the processor or the system's mathematics library.

use rand_core::{Rng, SeedableRng};
use rand_pcg::Pcg64;
use serde::Serialize;
use thiserror::Error;

/// How the next token is chosen. The default is greedy choice without a penalty.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sampling {
    /// Take the most likely token; temperature and the filters are then without effect.
    pub greedy: bool,
    /// Divides the logits; 0 means greedy.
    pub temperature: f32,
    /// Tokens kept; 0 keeps all.
    pub top_k: usize,
    /// Probability mass kept, 0 to 1; 1 keeps all.
    pub top_p: f32,
    /// Least probability kept, as a share of the largest, 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Above 1 makes tokens that occurred less likely, below 1 more likely.
    pub repetition_penalty: f32,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            greedy: true,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
        }
    }
}

/// A sampling setting out of range.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{name} = {value}: must be {range}")]
pub struct SamplingRangeError {
    /// The setting.
    pub name: &'static str,
    /// What it was.
    pub value: f32,
    /// What it may be.
    pub range: &'static str,
}

/// Logits that no token can be chosen from.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum SampleError {
    /// The model computed something that is not a number.
    #[error("the logit of token {token} is {value}; the model's output cannot be trusted")]
    NotFinite {
        /// First such token.
        token: usize,
        /// NaN or +infinity.
        value: f32,
    },
    /// Every token is impossible, or there is none.
    #[error("none of {vocab} tokens is possible: every logit is -infinity")]
    NothingPossible {
        /// Logits seen.
        vocab: usize,
    },
}

impl Sampling {
    /// Checks every setting.
    ///
    /// # Errors
    /// The first setting out of range.
    pub fn validate(&self) -> Result<(), SamplingRangeError> {
        let check = |name, value: f32, sound: bool, range| {
            if sound {
                Ok(())
            } else {
                Err(SamplingRangeError { name, value, range })
            }
        };
        let t = self.temperature;
        check(
            "temperature",
            t,
            t.is_finite() && t >= 0.0,
            "a number that is not negative",
        )?;
        check("top-p", self.top_p, (0.0..=1.0).contains(&self.top_p), "0 to 1")?;
        check("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1")?;
        let r = self.repetition_penalty;
        check(
            "repetition-penalty",
            r,
            r.is_finite() && r > 0.0,
            "a positive number",
        )
    }

    /// Whether the most likely token is always taken.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.greedy || self.temperature == 0.0
    }
}

/// Chooses the tokens of one answer.
#[derive(Clone, Debug)]
pub struct Sampler {
    settings: Sampling,
    rng: Pcg64,
    /// Whether a token occurred, by id; grown on demand.
    occurred: Vec<bool>,
    /// Logits after the penalty; FP64, where neither penalty nor temperature can overflow.
    scores: Vec<f64>,
    candidates: Vec<Candidate>,
    order: Vec<f64>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    /// exp((score - largest score) / temperature).
    weight: f64,
}

impl Sampler {
    /// A sampler for an answer to `prompt`, whose tokens count as having occurred.
    ///
    /// # Errors
    /// A setting out of range.
    pub fn new(settings: Sampling, prompt: &[u32]) -> Result<Self, SamplingRangeError> {
        settings.validate()?;
        let mut sampler = Self {
            settings,
            rng: Pcg64::seed_from_u64(settings.seed),
            occurred: Vec::new(),
            scores: Vec::new(),
            candidates: Vec::new(),
            order: Vec::new(),
        };
        for token in prompt {
            sampler.record(*token);
        }
        Ok(sampler)
    }

    /// Chooses the token that follows, and counts it as having occurred.
    ///
    /// # Errors
    /// [`SampleError`] when a logit is NaN or +infinity, or all are -infinity.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        self.penalize(logits)?;
        let token = if self.settings.is_greedy() {
            argmax(&self.scores)
        } else {
            self.filter();
            self.draw()
        };
        self.record(token);
        Ok(token)
    }

    fn record(&mut self, token: u32) {
        let i = token as usize;
        if i >= self.occurred.len() {
            self.occurred.resize(i + 1, false);
        }
        self.occurred[i] = true;
    }

    /// Copies the logits to `scores`, checked and with the penalty applied.
    fn penalize(&mut self, logits: &[f32]) -> Result<(), SampleError> {
        if let Some((token, value)) = logits
            .iter()
            .copied()
            .enumerate()
            .find(|(_, v)| v.is_nan() || *v == f32::INFINITY)
        {
            return Err(SampleError::NotFinite { token, value });
        }
        if logits.iter().all(|v| *v == f32::NEG_INFINITY) {
            return Err(SampleError::NothingPossible { vocab: logits.len() });
        }
        self.scores.clear();
        self.scores.extend(logits.iter().copied().map(f64::from));
        let penalty = f64::from(self.settings.repetition_penalty);
        if penalty != 1.0 {
            for (score, _) in self
                .scores
                .iter_mut()
                .zip(&self.occurred)
                .filter(|(_, seen)| **seen)
            {
                *score = if *score < 0.0 {
                    *score * penalty
                } else {
                    *score / penalty
                };
            }
        }
        Ok(())
    }

    /// Fills `candidates`, in order of token id, with what the three filters leave.
    fn filter(&mut self) {
        let Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            ..
        } = self.settings;
        let largest = self.scores[argmax(&self.scores) as usize];
        // A temperature does not change the order, so the k-th largest can be found before it is applied.
        let threshold = if top_k > 0 && top_k < self.scores.len() {
            self.order.clear();
            self.order.extend_from_slice(&self.scores);
            *self
                .order
                .select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a))
                .1
        } else {
            f64::NEG_INFINITY
        };
        let temperature = f64::from(temperature);
        self.candidates.clear();
        self.candidates
            .extend((0u32..).zip(&self.scores).filter_map(|(token, score)| {
                let kept = *score >= threshold && *score > f64::NEG_INFINITY;
                kept.then(|| Candidate {
                    token,
                    weight: libm::exp((*score - largest) / temperature),
                })
            }));
        if top_p < 1.0 {
            keep_top_p(&mut self.candidates, top_p);
        }
        if min_p > 0.0 {
            // Weights are relative to the most likely token, whose weight is 1.
            self.candidates.retain(|c| c.weight >= f64::from(min_p));
        }
    }

    /// Draws one of the candidates in proportion to their weights.
    fn draw(&mut self) -> u32 {
        let total: f64 = self.candidates.iter().map(|c| c.weight).sum();
        let mut rest = unit_interval(self.rng.next_u64()) * total;
        for c in &self.candidates {
            if rest < c.weight {
                return c.token;
            }
            rest -= c.weight;
        }
        // Rounding used up the last candidate's share: it is the one whose interval ends at `total`.
        let last = self.candidates.iter().rev().find(|c| c.weight > 0.0);
        last.expect("the most likely token has weight 1 and passes every filter")
            .token
    }
}

/// 53 bits of `bits` as a number in [0, 1).
fn unit_interval(bits: u64) -> f64 {
    const SCALE: f64 = 1.0 / (1u64 << 53) as f64;
    (bits >> 11) as f64 * SCALE
}

/// Index of the largest score, the first of several.
fn argmax(scores: &[f64]) -> u32 {
    let mut best = (0u32, f64::NEG_INFINITY);
    for (token, score) in (0u32..).zip(scores) {
        if *score > best.1 {
            best = (token, *score);
        }
    }
    best.0
}

/// Drops the least likely candidates while their summed probability is at most `1 - top_p`.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f32) {
    let total: f64 = candidates.iter().map(|c| c.weight).sum();
    let droppable = (1.0 - f64::from(top_p)) * total;
    // Candidates below an even share of what may be dropped are all dropped, whatever their order, so that only
    // the others need sorting: a few hundred of a vocabulary.
    let surely = droppable / candidates.len() as f64;
    let mut dropped: f64 = candidates.iter().map(|c| c.weight).filter(|w| *w < surely).sum();
    let mut rest: Vec<Candidate> = candidates
        .iter()
        .copied()
        .filter(|c| c.weight >= surely)
        .collect();
    // From the least likely; of equals the highest id goes first.
    rest.sort_unstable_by(|a, b| a.weight.total_cmp(&b.weight).then(b.token.cmp(&a.token)));
    let mut first_kept = 0;
    for c in &rest[..rest.len().saturating_sub(1)] {
        dropped += c.weight;
        if dropped > droppable {
            break;
        }
        first_kept += 1;
    }
    rest.drain(..first_kept);
    rest.sort_unstable_by_key(|c| c.token);
    *candidates = rest;
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: Sampling = Sampling {
        greedy: false,
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        seed: 7,
    };

    /// Probabilities of the tokens that may be drawn, by token id.
    fn distribution(settings: Sampling, prompt: &[u32], logits: &[f32]) -> Vec<(u32, f64)> {
        let mut s = Sampler::new(settings, prompt).expect("sound settings");
        s.penalize(logits).expect("sound logits");
        s.filter();
        let total: f64 = s.candidates.iter().map(|c| c.weight).sum();
        s.candidates.iter().map(|c| (c.token, c.weight / total)).collect()
    }

    fn assert_distribution(got: &[(u32, f64)], want: &[(u32, f64)]) {
        assert_eq!(got.len(), want.len(), "{got:?} against {want:?}");
        for (g, w) in got.iter().zip(want) {
            assert!(g.0 == w.0 && (g.1 - w.1).abs() < 1e-6, "{got:?} against {want:?}");
        }
    }

    /// Logits whose softmax is `p`.
    fn logits(p: &[f64]) -> Vec<f32> {
        p.iter().map(|p| p.ln() as f32).collect()
    }

    #[test]
    fn plain_sampling_is_the_softmax() {
        let want = [(0, 0.5), (1, 0.25), (2, 0.125), (3, 0.125)];
        assert_distribution(
            &distribution(SAMPLED, &[], &logits(&[0.5, 0.25, 0.125, 0.125])),
            &want,
        );
    }

    #[test]
    fn temperature_squares_probabilities_at_one_half() {
        // 0.6², 0.3², 0.1² = 0.36, 0.09, 0.01 of 0.46
        let got = distribution(
            Sampling {
                temperature: 0.5,
                ..SAMPLED
            },
            &[],
            &logits(&[0.6, 0.3, 0.1]),
        );
        assert_distribution(&got, &[(0, 0.36 / 0.46), (1, 0.09 / 0.46), (2, 0.01 / 0.46)]);
    }

    #[test]
    fn top_k_keeps_the_ties_of_the_last() {
        let p = logits(&[0.1, 0.4, 0.2, 0.2, 0.1]);
        let top = |top_k| distribution(Sampling { top_k, ..SAMPLED }, &[], &p);
        assert_distribution(&top(1), &[(1, 1.0)]);
        assert_distribution(&top(2), &[(1, 0.5), (2, 0.25), (3, 0.25)]);
        assert_distribution(&top(3), &top(2));
        assert_eq!(top(9).len(), 5);
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_p() {
        let p = logits(&[0.05, 0.5, 0.15, 0.3]);
        let top = |top_p| distribution(Sampling { top_p, ..SAMPLED }, &[], &p);
        assert_distribution(&top(0.0), &[(1, 1.0)]);
        assert_distribution(&top(0.45), &[(1, 1.0)]);
        assert_distribution(&top(0.55), &[(1, 0.625), (3, 0.375)]);
        assert_distribution(&top(0.9), &[(1, 0.5 / 0.95), (2, 0.15 / 0.95), (3, 0.3 / 0.95)]);
        assert_eq!(top(0.96).len(), 4);
    }

    #[test]
    fn top_p_drops_the_highest_id_of_equals_first() {
        let four = distribution(
            Sampling {
                top_p: 0.6,
                ..SAMPLED
            },
            &[],
            &[1.0; 4],
        );
        assert_distribution(&four, &[(0, 1.0 / 3.0), (1, 1.0 / 3.0), (2, 1.0 / 3.0)]);
        let all_equal = distribution(
            Sampling {
                top_p: 0.0,
                ..SAMPLED
            },
            &[],
            &[1.0; 4],
        );
        assert_distribution(&all_equal, &[(0, 1.0)]);
    }

    #[test]
    fn top_p_equals_the_plain_algorithm_on_many_distributions() {
        let mut rng = Pcg64::seed_from_u64(1);
        for case in 0..200 {
            let n = 1 + (rng.next_u64() % 60) as usize;
            let l: Vec<f32> = (0..n)
                .map(|_| (unit_interval(rng.next_u64()) * 12.0 - 6.0) as f32)
                .collect();
            let top_p = unit_interval(rng.next_u64()) as f32;
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|a, b| l[*a].total_cmp(&l[*b]).then(b.cmp(a)));
            let sum: f64 = l.iter().map(|v| f64::from(*v).exp()).sum();
            let mut passed = 0.0;
            let mut kept: Vec<u32> = Vec::new();
            for (rank, i) in order.iter().enumerate() {
                passed += f64::from(l[*i]).exp() / sum;
                if passed > 1.0 - f64::from(top_p) || rank == n - 1 {
                    kept.push(u32::try_from(*i).expect("small"));
                }
            }
            kept.sort_unstable();
            let got: Vec<u32> = distribution(Sampling { top_p, ..SAMPLED }, &[], &l)
                .iter()
                .map(|c| c.0)
                .collect();
            assert_eq!(got, kept, "case {case}, top_p {top_p}, logits {l:?}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_most_likely_token() {
        let p = logits(&[0.5, 0.3, 0.15, 0.05]);
        let min = |min_p| distribution(Sampling { min_p, ..SAMPLED }, &[], &p).len();
        assert_eq!(
            [
                min(0.0),
                min(0.09),
                min(0.11),
                min(0.29),
                min(0.31),
                min(0.61),
                min(1.0)
            ],
            [4, 4, 3, 3, 2, 1, 1]
        );
    }

    #[test]
    fn filters_act_in_the_order_top_k_top_p_min_p_and_renormalise_between() {
        // Top-k 3 leaves 0.4 0.3 0.2 of 0.9; p = 0.75 then needs 0.4/0.9 + 0.3/0.9 = 0.778. Without top-k first,
        // the two would reach 0.7 only and the third would stay.
        let p = logits(&[0.4, 0.3, 0.2, 0.1]);
        let got = distribution(
            Sampling {
                top_k: 3,
                top_p: 0.75,
                ..SAMPLED
            },
            &[],
            &p,
        );
        assert_distribution(&got, &[(0, 4.0 / 7.0), (1, 3.0 / 7.0)]);
        assert_eq!(
            distribution(
                Sampling {
                    top_p: 0.75,
                    ..SAMPLED
                },
                &[],
                &p
            )
            .len(),
            3
        );
        // Temperature comes before the filters: squared, 0.16 0.09 0.04 0.01 of 0.30; min-p 0.3 keeps 0.5625 only.
        let got = distribution(
            Sampling {
                temperature: 0.5,
                min_p: 0.3,
                ..SAMPLED
            },
            &[],
            &p,
        );
        assert_distribution(&got, &[(0, 0.64), (1, 0.36)]);
        assert_eq!(
            distribution(
                Sampling {
                    min_p: 0.3,
                    ..SAMPLED
                },
                &[],
                &p
            )
            .len(),
            3
        );
    }

    #[test]
    fn repetition_penalty_divides_positive_and_multiplies_negative_logits_once() {
        let settings = Sampling {
            repetition_penalty: 2.0,
            ..Sampling::default()
        };
        let mut s = Sampler::new(settings, &[0, 0, 3]).expect("sound");
        s.penalize(&[4.0, 3.0, 1.0, -1.0, 0.0]).expect("sound");
        assert_eq!(s.scores, [2.0, 3.0, 1.0, -2.0, 0.0]);
        // Greedy: 1 wins, is then penalised itself, and 0 wins at 2.0 against 1.5.
        assert_eq!(s.sample(&[4.0, 3.0, 1.0, -1.0, 0.0]), Ok(1));
        assert_eq!(s.sample(&[4.0, 3.0, 1.0, -1.0, 0.0]), Ok(0));
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        let mut s = Sampler::new(Sampling::default(), &[]).expect("sound");
        assert_eq!(s.sample(&[1.0, 5.0, 5.0, -2.0]), Ok(1));
        let zero = Sampling {
            temperature: 0.0,
            ..SAMPLED
        };
        assert_eq!(
            Sampler::new(zero, &[]).expect("sound").sample(&[1.0, 5.0, 5.0]),
            Ok(1)
        );
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let p = [0.4, 0.3, 0.2, 0.07, 0.03];
        let l = logits(&p);
        let mut s = Sampler::new(SAMPLED, &[]).expect("sound");
        let n = 100_000u32;
        let mut counts = [0u32; 5];
        for _ in 0..n {
            counts[s.sample(&l).expect("sound") as usize] += 1;
        }
        // Chi-squared with 4 degrees of freedom: 18.5 is passed once in a thousand seeds, and the seed is fixed.
        let chi: f64 = counts
            .iter()
            .zip(p)
            .map(|(c, p)| (f64::from(*c) - f64::from(n) * p).powi(2) / (f64::from(n) * p))
            .sum();
        assert!(
            chi < 18.5,
            "chi-squared {chi}, counts {counts:?}, seed {}",
            SAMPLED.seed
        );
    }

    #[test]
    fn a_seed_names_a_sequence_for_good() {
        // First outputs by a second implementation, written from the definitions of PCG-64 and `seed_from_u64`.
        let first = |seed| {
            let mut rng = Pcg64::seed_from_u64(seed);
            [rng.next_u64(), rng.next_u64()]
        };
        assert_eq!(first(0), [0x20ae_25da_d4e2_bc53, 0x58f9_38e1_2bbf_69fb]);
        assert_eq!(first(1), [0xd701_f5c8_2406_2d47, 0x046d_af9b_8aba_af57]);
        assert_eq!(first(42), [0x39fc_b970_a300_1809, 0x3d36_1897_2c55_d911]);
        let l: Vec<f32> = (0..32).map(|i| ((i * 7) % 13) as f32 * 0.25).collect();
        let tokens = |seed| {
            let mut s = Sampler::new(Sampling { seed, ..SAMPLED }, &[]).expect("sound");
            (0..12).map(|_| s.sample(&l).expect("sound")).collect::<Vec<_>>()
        };
        assert_eq!(tokens(42), tokens(42));
        assert_ne!(tokens(42), tokens(43));
    }

    #[test]
    fn bad_logits_are_errors() {
        let mut s = Sampler::new(SAMPLED, &[]).expect("sound");
        let nan = s.sample(&[0.0, f32::NAN]);
        assert!(
            matches!(nan, Err(SampleError::NotFinite { token: 1, .. })),
            "{nan:?}"
        );
        assert_eq!(
            s.sample(&[f32::INFINITY, 0.0]),
            Err(SampleError::NotFinite {
                token: 0,
                value: f32::INFINITY
            })
        );
        assert_eq!(
            s.sample(&[f32::NEG_INFINITY; 3]),
            Err(SampleError::NothingPossible { vocab: 3 })
        );
        assert_eq!(s.sample(&[]), Err(SampleError::NothingPossible { vocab: 0 }));
        assert_eq!(s.sample(&[f32::NEG_INFINITY, 1.0]), Ok(1));
    }

    #[test]
    fn extreme_settings_still_choose_the_most_likely_token() {
        let l = [3.0e38, 1.0, -3.0e38];
        for settings in [
            Sampling {
                temperature: 1e-30,
                ..SAMPLED
            },
            Sampling {
                repetition_penalty: 1e-30,
                ..SAMPLED
            },
            Sampling {
                top_p: 0.0,
                min_p: 1.0,
                top_k: 1,
                ..SAMPLED
            },
        ] {
            assert_eq!(
                Sampler::new(settings, &[0]).expect("sound").sample(&l),
                Ok(0),
                "{settings:?}"
            );
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for (settings, name) in [
            (
                Sampling {
                    temperature: -1.0,
                    ..SAMPLED
                },
                "temperature",
            ),
            (
                Sampling {
                    temperature: f32::NAN,
                    ..SAMPLED
                },
                "temperature",
            ),
            (
                Sampling {
                    top_p: 1.5,
                    ..SAMPLED
                },
                "top-p",
            ),
            (
                Sampling {
                    min_p: -0.1,
                    ..SAMPLED
                },
                "min-p",
            ),
            (
                Sampling {
                    repetition_penalty: 0.0,
                    ..SAMPLED
                },
                "repetition-penalty",
            ),
        ] {
            assert_eq!(Sampler::new(settings, &[]).expect_err(name).name, name);
        }
    }
}
