//! An answer: generated, printed as it comes, reported. What `run` and `chat` share.

use std::sync::atomic::Ordering;

use horizon_runtime::engine::{Engine, OpenTimings, Settings};
use horizon_runtime::process::ResidentMemory;
use horizon_runtime::residency::{Residency, ResidencyReport};
use horizon_runtime::session::{Answer, Request, Session, StopReason};
use horizon_runtime::text::TextFiles;
use serde::Serialize;

use super::report::{ResolvedPlan, TimingReport, residency_line, summary};
use crate::interrupt::Work;
use crate::output::{CliError, Output, write_stdout};
use crate::resolve::GenerationPlan;

/// A model that answers prompts.
pub struct Answerer<'a> {
    /// Its session.
    pub session: Session,
    text: &'a TextFiles,
    plan: GenerationPlan,
    resolved: ResolvedPlan,
    open: OpenTimings,
    residency: Residency,
    special_shown: bool,
    out: Output,
}

/// What `--json` prints of an answer.
#[derive(Serialize)]
pub struct AnswerReport<'a> {
    text: &'a str,
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    stop_reason: StopReason,
    stop_string: Option<&'a str>,
    timings: TimingReport,
    /// Counted since the first answer.
    #[serde(flatten)]
    residency: ResidencyReport,
    settings: &'a ResolvedPlan,
    /// When the answer was done.
    #[serde(skip)]
    resident: ResidentMemory,
}

impl<'a> Answerer<'a> {
    /// A model whose prompts come from a chat template or not, and whose special tokens are printed or not.
    pub fn new(
        engine: Engine,
        text: &'a TextFiles,
        plan: GenerationPlan,
        (chat, special_shown): (bool, bool),
        out: Output,
    ) -> Self {
        Self {
            resolved: ResolvedPlan::new(&engine, &plan, chat, special_shown),
            open: engine.timings(),
            residency: engine.residency(),
            session: engine.into_session(),
            text,
            plan,
            special_shown,
            out,
        }
    }

    /// Seed of the draws; `None` where nothing is drawn.
    pub fn seed(&self) -> Option<u64> {
        let sampling = &self.plan.sampling;
        (!sampling.is_greedy()).then_some(sampling.seed)
    }

    /// Generates, printing the text as it comes unless stdout is for JSON. The seed of the draws is the plan's plus
    /// `turn`.
    pub fn generate(&mut self, prompt: &[u32], turn: u64) -> Result<Answer, CliError> {
        let mut sampling = self.plan.sampling;
        sampling.seed = sampling.seed.wrapping_add(turn);
        let request = Request {
            prompt: prompt.to_vec(),
            sampling,
            max_tokens: self.plan.max_tokens,
            stop: self.plan.stop.clone(),
            eos: self.plan.eos_token_ids.clone(),
        };
        let (out, work) = (self.out, Work::begin());
        let mut decoder = self.text.tokenizer.continuation(!self.special_shown);
        let mut printed = Ok(());
        let answer = self
            .session
            .generate(&request, &mut decoder, work.cancel(), &mut |piece| {
                if !out.is_json() && printed.is_ok() {
                    printed = write_stdout(piece);
                    // If nobody reads, there is nothing to go on for.
                    work.cancel().fetch_or(printed.is_err(), Ordering::SeqCst);
                }
            });
        printed?;
        Ok(answer?)
    }

    /// What the engine was opened with.
    pub fn settings(&self) -> &Settings {
        self.resolved.engine()
    }

    /// The report of an answer.
    pub fn report<'r>(&'r self, prompt: &'r [u32], answer: &'r Answer) -> AnswerReport<'r> {
        AnswerReport {
            text: &answer.text,
            prompt_ids: prompt,
            token_ids: &answer.token_ids,
            stop_reason: answer.stop,
            stop_string: answer.stop_string.as_deref(),
            timings: TimingReport::new(self.open, answer, prompt.len()),
            residency: ResidencyReport::new(self.resolved.engine(), &self.residency),
            settings: &self.resolved,
            resident: ResidentMemory::now(),
        }
    }
}

impl AnswerReport<'_> {
    /// Ends the line of the answer, or prints `object`, which holds this report; then speed and memory on stderr.
    pub fn print(
        &self,
        object: &impl Serialize,
        answer: &Answer,
        seed: Option<u64>,
        out: Output,
    ) -> Result<(), CliError> {
        out.result(object, || {
            if answer.text.ends_with('\n') {
                String::new()
            } else {
                "\n".into()
            }
        })?;
        out.note(&summary(answer, self.prompt_ids.len(), seed, self.resident));
        if let Some(line) = residency_line(&self.residency) {
            out.note(&line);
        }
        if let Some(memory) = &self.settings.engine().device_memory {
            out.note(&memory.line());
        }
        Ok(())
    }
}
