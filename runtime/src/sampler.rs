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

use horizon_core::backend::StepOutput;
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
    /// The same, told by a backend that chose the token itself.
    #[error("a logit is NaN or +infinity; the model's output cannot be trusted")]
    NoChoice,
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

    /// Whether [`sample`](Self::sample) gives the most likely token as the model scores them, so that a backend may
    /// choose it.
    #[must_use]
    pub fn takes_most_likely(&self) -> bool {
        self.settings.is_greedy() && self.settings.repetition_penalty == 1.0
    }

    /// Takes the token that a backend chose, and counts it as having occurred.
    ///
    /// # Errors
    /// [`SampleError::NoChoice`] when it could choose none.
    pub fn take(&mut self, token: u32) -> Result<u32, SampleError> {
        if token == StepOutput::NO_TOKEN {
            return Err(SampleError::NoChoice);
        }
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
#[path = "sampler_tests.rs"]
mod tests;
