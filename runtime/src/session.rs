//! One conversation with a model: prefill in chunks, decode token by token, stop for a named reason.
//!
//! **Reuse.** When the next prompt begins like the last one, the keys and values that *prefill* wrote for the
//! common beginning are kept; those that decode wrote are computed again with the prompt. A turn that reuses
//! therefore gives the same bits as a fresh one, whatever the executor of single rows is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use horizon_cache::trace::{Trace, TraceError};
use horizon_core::backend::{CompiledModel, Phase, StepBatch, StepError, StepOutput, StepReport, StepRow};
use horizon_core::provider::ExpertProvider;
use serde::Serialize;
use thiserror::Error;

use crate::eval::Evaluator;
use crate::recorder::Recorder;
use crate::sampler::{SampleError, Sampler, Sampling, SamplingRangeError};
use crate::stream::{EmptyStopString, StopStrings};

/// Turns token ids into text, one id at a time.
pub trait TextDecoder {
    /// The text that is certain after `token`; empty while a character is incomplete.
    ///
    /// # Errors
    /// When the tokenizer cannot decode the token.
    fn push(&mut self, token: u32) -> Result<String, TextError>;

    /// The text that is left when no token follows.
    ///
    /// # Errors
    /// When the tokenizer cannot decode what is left.
    fn finish(&mut self) -> Result<String, TextError>;
}

/// A token that could not be decoded.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct TextError(pub String);

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens generated; `None`: until something else ends the answer.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer and are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the answer. Empty to go on past the end of text.
    pub eos: Vec<u32>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// An end-of-sequence token; it is the last of the token ids and not in the text.
    Eos,
    /// One of the stop strings.
    StopString,
    /// The number of tokens asked for was reached.
    MaxTokens,
    /// Prompt and answer fill the context.
    ContextFull,
    /// The caller asked to stop.
    Cancelled,
}

/// Where the time of an answer went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Timings {
    /// Start of the request to the first token (or to the end of the prefill if no token was generated).
    pub first_token_s: f64,
    /// First token to last token.
    pub decode_s: f64,
    /// The whole request.
    pub total_s: f64,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The text, without a stop string or an end-of-sequence token.
    pub text: String,
    /// Every token generated, one that ended the answer included.
    pub token_ids: Vec<u32>,
    /// Why it ended.
    pub stop: StopReason,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
    /// Prompt tokens whose keys and values were kept from an earlier turn.
    pub reused: usize,
    /// Times.
    pub timings: Timings,
    /// What the prefill steps did, summed.
    pub prefill: StepReport,
    /// What the decode steps did, summed.
    pub decode: StepReport,
}

impl Answer {
    /// Tokens after the first, over the time they took; `None` with fewer than two tokens.
    #[must_use]
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        let after_first = self.token_ids.len().checked_sub(1).filter(|n| *n > 0)?;
        (self.timings.decode_s > 0.0).then(|| after_first as f64 / self.timings.decode_s)
    }
}

/// An answer that could not be generated.
#[derive(Debug, Error)]
pub enum GenerateError {
    /// Nothing to continue.
    #[error("the prompt has no tokens; there is nothing to continue")]
    EmptyPrompt,
    /// The prompt alone does not fit.
    #[error(
        "the prompt has {tokens} tokens and the context holds {context}; shorten the prompt{}",
        if context < model_context {
            format!(" or raise --ctx (the model was made for {model_context})")
        } else {
            ": the model was made for no more".to_owned()
        }
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the context.
        context: usize,
        /// Positions the model was made for.
        model_context: usize,
    },
    /// A sampling setting.
    #[error(transparent)]
    Sampling(#[from] SamplingRangeError),
    /// A stop string.
    #[error(transparent)]
    Stop(#[from] EmptyStopString),
    /// The model's output.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// A step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The record of its routing.
    #[error(transparent)]
    Trace(#[from] TraceError),
}

/// Sizes that a session keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Positions of the KV cache.
    pub context: usize,
    /// Positions the model was made for.
    pub model_context: usize,
    /// Rows of a prefill step.
    pub prefill_chunk: usize,
}

impl Limits {
    /// Whether a prompt can be answered at all.
    ///
    /// # Errors
    /// [`GenerateError::EmptyPrompt`], [`GenerateError::PromptTooLong`].
    pub fn check_prompt(&self, prompt: &[u32]) -> Result<(), GenerateError> {
        match prompt.len() {
            0 => Err(GenerateError::EmptyPrompt),
            tokens if tokens > self.context => Err(GenerateError::PromptTooLong {
                tokens,
                context: self.context,
                model_context: self.model_context,
            }),
            _ => Ok(()),
        }
    }
}

/// A model, its KV cache, and what is in it.
pub struct Session {
    model: Box<dyn CompiledModel>,
    experts: Arc<dyn ExpertProvider>,
    limits: Limits,
    /// Tokens whose keys and values prefill wrote, from position 0.
    prefilled: Vec<u32>,
    recorder: Option<Recorder>,
}

impl Session {
    /// A session with an empty cache.
    #[must_use]
    pub fn new(model: Box<dyn CompiledModel>, experts: Arc<dyn ExpertProvider>, limits: Limits) -> Self {
        Self {
            model,
            experts,
            limits,
            prefilled: Vec::new(),
            recorder: None,
        }
    }

    /// Records the routing of every step from now on. Steps then also copy what their stages produced.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// Ends recording and gives what was recorded, if anything was to be.
    pub fn recorded(&mut self) -> Option<Trace> {
        self.recorder.take().map(Recorder::finish)
    }

    /// Positions of the KV cache.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// For measurements between conversations, which they end.
    pub fn evaluator(&mut self) -> Evaluator<'_> {
        self.reset();
        Evaluator {
            model: self.model.as_mut(),
            experts: &self.experts,
            chunk: self.limits.prefill_chunk,
        }
    }

    /// Forgets the conversation.
    pub fn reset(&mut self) {
        self.prefilled.clear();
    }

    /// Generates an answer. Text goes to `sink` as soon as it is certain; `cancel` is looked at between steps.
    ///
    /// # Errors
    /// [`GenerateError`]. The session can be used again afterwards.
    pub fn generate(
        &mut self,
        request: &Request,
        decoder: &mut dyn TextDecoder,
        cancel: &AtomicBool,
        sink: &mut dyn FnMut(&str),
    ) -> Result<Answer, GenerateError> {
        let start = Instant::now();
        let prompt = request.prompt.as_slice();
        self.limits.check_prompt(prompt)?;
        let mut sampler = Sampler::new(request.sampling, prompt)?;
        let mut output = Output::new(StopStrings::new(&request.stop)?, decoder, sink);
        let reused = self.reusable(prompt);
        let tokens_only = sampler.takes_most_likely();
        let (prefill, mut last) = self.prefill(prompt, reused, tokens_only, cancel)?;
        let mut first_token = start.elapsed();
        let mut decode = StepReport::default();
        let most = request.max_tokens.unwrap_or(usize::MAX);
        let stop = loop {
            // The prefill was cut short, or the answer is.
            let Some(scored_row) = last.as_ref().filter(|_| !cancel.load(Ordering::Relaxed)) else {
                break StopReason::Cancelled;
            };
            let (generated, position) = (output.token_ids.len(), prompt.len() + output.token_ids.len());
            if generated >= most {
                break StopReason::MaxTokens;
            }
            if position >= self.limits.context {
                break StopReason::ContextFull;
            }
            let token = choose(&mut sampler, scored_row)?;
            if generated == 0 {
                first_token = start.elapsed();
            }
            if let Some(reason) = output.add(token, &request.eos)? {
                break reason;
            }
            if generated + 1 < most && position + 1 < self.limits.context {
                let row = StepRow {
                    token,
                    position,
                    sequence: 0,
                    logits: true,
                };
                let step = self.step(vec![row], Phase::Decode, tokens_only)?;
                add(&mut decode, step.report);
                last = Some(step);
            }
        };
        output.finish(stop)?;
        let total = start.elapsed();
        Ok(Answer {
            text: output.text,
            timings: timings(first_token, output.last_token, start, total),
            token_ids: output.token_ids,
            stop,
            stop_string: output.stop_string,
            reused,
            prefill,
            decode,
        })
    }

    /// Prompt tokens whose keys and values can be kept; always fewer than the prompt has, as its last token must
    /// run to give logits.
    fn reusable(&self, prompt: &[u32]) -> usize {
        let common = prompt
            .iter()
            .zip(&self.prefilled)
            .take_while(|(a, b)| a == b)
            .count();
        common.min(prompt.len() - 1)
    }

    /// Runs the prompt from position `from`; gives the step with its last token, or none when cancelled.
    fn prefill(
        &mut self,
        prompt: &[u32],
        from: usize,
        tokens_only: bool,
        cancel: &AtomicBool,
    ) -> Result<(StepReport, Option<StepOutput>), GenerateError> {
        self.prefilled.truncate(from);
        let mut report = StepReport::default();
        let mut last = None;
        while self.prefilled.len() < prompt.len() {
            if cancel.load(Ordering::Relaxed) {
                return Ok((report, None));
            }
            let start = self.prefilled.len();
            let end = prompt.len().min(start + self.limits.prefill_chunk);
            let rows = (start..end).map(|position| StepRow {
                token: prompt[position],
                position,
                sequence: 0,
                logits: position + 1 == prompt.len(),
            });
            let step = self.step(rows.collect(), Phase::Prefill, tokens_only)?;
            self.prefilled.extend_from_slice(&prompt[start..end]);
            add(&mut report, step.report);
            last = Some(step);
        }
        Ok((report, last))
    }

    fn step(
        &mut self,
        rows: Vec<StepRow>,
        phase: Phase,
        tokens_only: bool,
    ) -> Result<StepOutput, GenerateError> {
        let count = rows.len();
        let taps = self.recorder.is_some();
        let ticket = self.model.enqueue(
            &StepBatch {
                rows,
                taps,
                phase,
                tokens_only,
            },
            &self.experts,
        )?;
        let output = self.model.finish(ticket)?;
        if let Some(recorder) = &mut self.recorder {
            recorder.push(count, &output.taps)?;
        }
        Ok(output)
    }
}

/// The token that follows the last row of a step: from its logits, or what a backend that was asked for tokens only chose.
fn choose(sampler: &mut Sampler, step: &StepOutput) -> Result<u32, SampleError> {
    match (step.logits.as_slice(), step.tokens.as_slice()) {
        ([], [token]) => sampler.take(*token),
        (logits, _) => sampler.sample(logits),
    }
}

fn add(sum: &mut StepReport, step: StepReport) {
    sum.routed += step.routed;
    sum.records += step.records;
}

fn timings(first: Duration, last: Option<Instant>, start: Instant, total: Duration) -> Timings {
    let first_token_s = first.as_secs_f64();
    let decode_s = last.map_or(0.0, |last| {
        last.duration_since(start).saturating_sub(first).as_secs_f64()
    });
    Timings {
        first_token_s,
        decode_s,
        total_s: total.as_secs_f64(),
    }
}

/// The answer as it grows.
struct Output<'a> {
    stops: StopStrings,
    decoder: &'a mut dyn TextDecoder,
    sink: &'a mut dyn FnMut(&str),
    text: String,
    token_ids: Vec<u32>,
    last_token: Option<Instant>,
    stop_string: Option<String>,
}

impl<'a> Output<'a> {
    fn new(stops: StopStrings, decoder: &'a mut dyn TextDecoder, sink: &'a mut dyn FnMut(&str)) -> Self {
        Self {
            stops,
            decoder,
            sink,
            text: String::new(),
            token_ids: Vec::new(),
            last_token: None,
            stop_string: None,
        }
    }

    /// Adds a token; says whether it ends the answer.
    fn add(&mut self, token: u32, eos: &[u32]) -> Result<Option<StopReason>, TextError> {
        self.token_ids.push(token);
        self.last_token = Some(Instant::now());
        if eos.contains(&token) {
            return Ok(Some(StopReason::Eos));
        }
        let piece = self.decoder.push(token)?;
        Ok(self.watch(&piece))
    }

    /// Lets through what the decoder and the stop strings held back.
    fn finish(&mut self, stop: StopReason) -> Result<(), TextError> {
        if stop != StopReason::StopString {
            let rest = self.decoder.finish()?;
            self.watch(&rest);
            let held = self.stops.finish();
            self.emit(&held);
        }
        Ok(())
    }

    fn watch(&mut self, piece: &str) -> Option<StopReason> {
        let increment = self.stops.push(piece);
        self.emit(&increment.text);
        self.stop_string = increment.stop;
        self.stop_string.as_ref().map(|_| StopReason::StopString)
    }

    fn emit(&mut self, text: &str) {
        if !text.is_empty() {
            self.text.push_str(text);
            (self.sink)(text);
        }
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
