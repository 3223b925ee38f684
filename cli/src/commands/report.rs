//! What `run` and `chat` say about an answer.

use horizon_core::observe::Observation;
use horizon_runtime::engine::{Engine, OpenTimings, Settings};
use horizon_runtime::process::ResidentMemory;
use horizon_runtime::residency::ResidencyReport;
use horizon_runtime::session::{Answer, StopReason, Timings};
use serde::Serialize;

use crate::output::bytes;
use crate::resolve::GenerationPlan;

/// The resolved plan: everything that the answer depends on beside the prompt.
#[derive(Clone, Debug, Serialize)]
pub struct ResolvedPlan {
    #[serde(flatten)]
    engine: Settings,
    #[serde(flatten)]
    generation: GenerationPlan,
    /// `raw` or `chat`.
    prompt_mode: &'static str,
    /// Whether special tokens are shown in the text.
    special_tokens: &'static str,
}

impl ResolvedPlan {
    /// The plan of an engine and a generation.
    pub fn new(engine: &Engine, generation: &GenerationPlan, chat: bool, special_shown: bool) -> Self {
        Self {
            engine: engine.settings().clone(),
            generation: generation.clone(),
            prompt_mode: if chat { "chat" } else { "raw" },
            special_tokens: if special_shown { "show" } else { "hide" },
        }
    }

    /// The engine's part.
    pub fn engine(&self) -> &Settings {
        &self.engine
    }
}

/// Times of an answer.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TimingReport {
    #[serde(flatten)]
    open: OpenTimings,
    #[serde(flatten)]
    answer: Timings,
    prompt_tokens: usize,
    reused_tokens: usize,
    generated_tokens: usize,
    /// Tokens after the first, over the time from the first to the last.
    decode_tokens_per_second: Option<f64>,
}

impl TimingReport {
    /// The times of an answer to a prompt of so many tokens.
    pub fn new(open: OpenTimings, answer: &Answer, prompt_tokens: usize) -> Self {
        Self {
            open,
            answer: answer.timings,
            prompt_tokens,
            reused_tokens: answer.reused,
            generated_tokens: answer.token_ids.len(),
            decode_tokens_per_second: answer.decode_tokens_per_second(),
        }
    }
}

/// The line about the cache, if there is one.
pub fn residency_line(r: &ResidencyReport) -> Option<String> {
    let (capacity, policy) = r.settings.capacity.zip(r.settings.policy)?;
    let total = &r.observations.total;
    let (Observation::Observed(hits), Observation::Observed(misses), Observation::Observed(moved)) =
        (total.hits, total.misses, total.h2d_bytes)
    else {
        return None;
    };
    let asked = hits + misses;
    let rate = match asked {
        0 => "-".into(),
        _ => format!("{:.1} %", hits as f64 / asked as f64 * 100.0),
    };
    Some(format!(
        "{capacity} experts a layer resident, {policy} · hit rate {rate} ({hits} of {asked}) · {} moved to slots",
        bytes(moved)
    ))
}

/// The line after an answer.
pub fn summary(answer: &Answer, prompt_tokens: usize, seed: Option<u64>, memory: ResidentMemory) -> String {
    let mut parts = vec![
        format!("first token {:.1} ms", answer.timings.first_token_s * 1e3),
        match answer.decode_tokens_per_second() {
            Some(rate) => format!("decode {rate:.1} tok/s"),
            None => "decode -".into(),
        },
        format!(
            "{} tokens ({prompt_tokens} in the prompt)",
            answer.token_ids.len()
        ),
    ];
    if let (Some(peak), Some(anonymous)) = (memory.peak_bytes, memory.anonymous_bytes) {
        parts.push(format!(
            "peak RSS {} ({} anonymous now)",
            bytes(peak),
            bytes(anonymous)
        ));
    }
    parts.extend(seed.map(|s| format!("seed {s}")));
    parts.push(match (answer.stop, &answer.stop_string) {
        (_, Some(text)) => format!("stopped by {text:?}"),
        (StopReason::Eos, _) => "end of text".into(),
        (StopReason::ContextFull, _) => "the context is full".into(),
        (StopReason::Cancelled, _) => "interrupted".into(),
        (StopReason::MaxTokens | StopReason::StopString, _) => "token limit".into(),
    });
    parts.join(" · ")
}
