//! Decode speed against its floor: the bytes that a token must read, over the bandwidth of the memory they are in.

use std::ops::Range;

use horizon_core::record::RecordLayout;
use horizon_core::spec::ModelSpec;
use horizon_runtime::bandwidth::{self, Bandwidth};
use horizon_runtime::device::Device;
use horizon_runtime::engine::{self, Engine, Settings};
use horizon_runtime::footprint::BytesPerToken;
use horizon_runtime::session::Answer;
use serde::{Serialize, Serializer};

use crate::output::{CliError, bytes};

/// Passes over host memory; the fastest counts.
const PASSES: u32 = 5;

/// Bandwidth of the memory that the model is in, measured now.
///
/// # Errors
/// When the buffer or the threads cannot be had.
pub fn bandwidth(device: Option<&Device>, settings: &Settings) -> Result<Bandwidth, CliError> {
    match device {
        Some(device) => Ok(device.read_bandwidth()?),
        None => Ok(engine::pool(settings.threads)?.install(|| bandwidth::measure(PASSES))?),
    }
}

/// What a decode step reads, averaged over `positions`.
#[must_use]
pub fn mean_bytes(
    spec: &ModelSpec,
    layout: Option<&RecordLayout>,
    settings: &Settings,
    positions: Range<usize>,
) -> BytesPerToken {
    let n = positions.len().max(1) as u64;
    let kv: u64 = positions
        .map(|p| BytesPerToken::at(spec, layout, settings.dense, settings.activations, p).kv)
        .sum();
    let at_zero = BytesPerToken::at(spec, layout, settings.dense, settings.activations, 0);
    BytesPerToken {
        kv: kv / n,
        total: at_zero.total + kv / n,
        ..at_zero
    }
}

/// What an answer's speed is held against.
#[derive(Debug, Serialize)]
pub struct Floor {
    bytes_per_token: BytesPerToken,
    memory_bandwidth: Bandwidth,
    /// tokens/s times bytes a token, over the bandwidth.
    fraction_of_bandwidth: f64,
}

impl Floor {
    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        let gb = |b: f64| format!("{:.2} GB/s", b / 1e9);
        let all = self.memory_bandwidth.bytes_per_second;
        format!(
            "{} a token, {} of {} measured here ({}): {:.1} % of the byte floor",
            bytes(self.bytes_per_token.total),
            gb(all * self.fraction_of_bandwidth),
            gb(all),
            self.memory_bandwidth.memory,
            self.fraction_of_bandwidth * 100.0
        )
    }
}

/// A floor, or the word for one that nobody measured.
#[derive(Debug)]
pub struct Measured(pub Option<Floor>);

impl Serialize for Measured {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Some(floor) => floor.serialize(s),
            None => s.serialize_str("UNKNOWN"),
        }
    }
}

/// What is kept of an engine to tell its floor later.
pub struct Yardstick {
    spec: std::sync::Arc<ModelSpec>,
    layout: Option<RecordLayout>,
    device: Option<Device>,
}

impl Yardstick {
    /// Of an engine.
    #[must_use]
    pub fn of(engine: &Engine) -> Self {
        Self {
            spec: engine.spec().clone(),
            layout: engine.layout().cloned(),
            device: engine.device(),
        }
    }

    /// Holds an answer to a prompt of so many tokens against bandwidth measured now; `None` if it has fewer than two.
    ///
    /// # Errors
    /// As [`bandwidth()`].
    pub fn hold(
        &self,
        settings: &Settings,
        answer: &Answer,
        prompt_tokens: usize,
    ) -> Result<Option<Floor>, CliError> {
        let Some(rate) = answer.decode_tokens_per_second() else {
            return Ok(None);
        };
        let positions = prompt_tokens..prompt_tokens + answer.token_ids.len() - 1;
        let bytes_per_token = mean_bytes(&self.spec, self.layout.as_ref(), settings, positions);
        let memory_bandwidth = bandwidth(self.device.as_ref(), settings)?;
        Ok(Some(Floor {
            fraction_of_bandwidth: rate * bytes_per_token.total as f64 / memory_bandwidth.bytes_per_second,
            bytes_per_token,
            memory_bandwidth,
        }))
    }
}
