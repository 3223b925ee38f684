//! How a model's routing spreads: what a cache of experts will meet, and whether synthetic weights are usable.

use std::sync::Arc;

use horizon_core::backend::{CompiledModel, StepBatch, StepError, StepRow};
use horizon_core::ids::LayerId;
use horizon_core::provider::ExpertProvider;
use horizon_core::spec::ModelSpec;
use horizon_core::stage::{Stage, TapData};
use serde::Serialize;

/// The routing of a sequence of tokens.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RoutingLoad {
    /// Tokens run.
    pub tokens: usize,
    /// Experts a layer.
    pub experts: usize,
    /// Experts a token.
    pub top_k: usize,
    /// Every layer with routed experts, in order.
    pub layers: Vec<LayerLoad>,
}

/// The routing of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerLoad {
    /// Layer.
    pub layer: LayerId,
    /// Tokens of the expert that had the fewest.
    pub least: usize,
    /// Tokens of the expert in the middle (the upper one of two).
    pub median: usize,
    /// Tokens of the expert that had the most.
    pub most: usize,
    /// Share of a token's experts that the token before it used too, averaged over the tokens after the first.
    pub repeated: f64,
}

impl RoutingLoad {
    /// Tokens an expert would have if all had the same.
    #[must_use]
    pub fn even(&self) -> f64 {
        (self.tokens * self.top_k) as f64 / self.experts as f64
    }

    /// [`LayerLoad::repeated`] if each token chose its experts by lot.
    #[must_use]
    pub fn repeated_by_chance(&self) -> f64 {
        self.top_k as f64 / self.experts as f64
    }

    /// Runs `tokens` uniformly random token ids of `seed` through a model as one sequence, in steps of at most
    /// `chunk` rows, and counts which experts they choose. `None` for a model without routed experts.
    ///
    /// # Errors
    /// What the backend refuses, e.g. more tokens than the context holds.
    pub fn measure(
        model: &mut dyn CompiledModel,
        experts: &Arc<dyn ExpertProvider>,
        spec: &ModelSpec,
        tokens: usize,
        chunk: usize,
        seed: u64,
    ) -> Result<Option<Self>, StepError> {
        let Some(moe) = spec.moe() else { return Ok(None) };
        let ids: Vec<u32> = random_tokens(spec.vocab, seed).take(tokens).collect();
        let mut chosen: Vec<(LayerId, Vec<i32>)> = spec.moe_layers().map(|l| (l, Vec::new())).collect();
        for (i, part) in ids.chunks(chunk).enumerate() {
            let rows = (i * chunk..)
                .zip(part)
                .map(|(position, token)| StepRow {
                    token: *token,
                    position,
                    sequence: 0,
                    logits: false,
                })
                .collect();
            let ticket = model.enqueue(
                &StepBatch {
                    rows,
                    taps: true,
                    ..StepBatch::default()
                },
                experts,
            )?;
            for tap in model.finish(ticket)?.taps {
                if let (Stage::TopkIndex(layer), TapData::I32(data)) = (tap.stage, tap.data)
                    && let Ok(row) = chosen.binary_search_by_key(&layer, |(l, _)| *l)
                {
                    chosen[row].1.extend(data);
                }
            }
        }
        let layers = chosen
            .iter()
            .map(|(layer, choices)| LayerLoad::of(*layer, choices, moe.experts, moe.top_k))
            .collect();
        Ok(Some(Self {
            tokens,
            experts: moe.experts,
            top_k: moe.top_k,
            layers,
        }))
    }
}

impl LayerLoad {
    /// The load of a layer from the experts chosen, `[tokens, top_k]`.
    ///
    /// # Panics
    /// When an expert is outside `0..experts`.
    #[must_use]
    pub fn of(layer: LayerId, choices: &[i32], experts: usize, top_k: usize) -> Self {
        let mut load = vec![0usize; experts];
        for expert in choices {
            load[usize::try_from(*expert).expect("expert ids are not negative")] += 1;
        }
        load.sort_unstable();
        let tokens = choices.chunks_exact(top_k);
        let pairs = tokens.clone().zip(tokens.skip(1));
        let repeats: usize = pairs
            .clone()
            .map(|(a, b)| b.iter().filter(|e| a.contains(e)).count())
            .sum();
        let (least, median, most) = (load[0], load[experts / 2], load[experts - 1]);
        let repeated = match pairs.count() {
            0 => 0.0,
            n => repeats as f64 / (n * top_k) as f64,
        };
        Self {
            layer,
            least,
            median,
            most,
            repeated,
        }
    }
}

/// Uniformly random token ids: splitmix64, the high bits scaled to the vocabulary.
///
/// # Panics
/// Never: the ids are below `vocab`, which fits a `u32`.
pub fn random_tokens(vocab: usize, seed: u64) -> impl Iterator<Item = u32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let scaled = (u128::from(z ^ (z >> 31)) * vocab as u128) >> 64;
        u32::try_from(scaled).expect("below the vocabulary")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_routing_is_counted() {
        let load = LayerLoad::of(LayerId(3), &[0, 1, 1, 2, 1, 2, 0, 2], 4, 2);
        let want = LayerLoad {
            layer: LayerId(3),
            least: 0,
            median: 3,
            most: 3,
            repeated: 4.0 / 6.0,
        };
        assert_eq!(load, want);
        assert_eq!(LayerLoad::of(LayerId(0), &[1], 2, 1).repeated, 0.0);
    }

    #[test]
    fn random_tokens_cover_the_vocabulary_and_follow_the_seed() {
        let draw = |seed| random_tokens(7, seed).take(500).collect::<Vec<u32>>();
        let mut seen = draw(1);
        assert_ne!(seen, draw(2));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5, 6]);
    }
}
