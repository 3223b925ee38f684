//! A model for tests of the session: it computes nothing and checks everything.
//!
//! Its "keys and values" are the tokens themselves, marked by who wrote them: prefill, or decode (a single row
//! whose token is what the step before gave). Its next token is a hash of all of them, so that a token kept,
//! skipped or overwritten by mistake changes the answer, and so does a decode-written row that a later turn reuses.

use std::sync::{Arc, Mutex};

use horizon_core::backend::{
    CompiledModel, ExecutorId, Phase, StepBatch, StepError, StepOutput, StepReport, Ticket,
};
use horizon_core::ids::ExpertId;
use horizon_core::provider::{AcquireError, ExpertProvider, GroupLease, Hold, RoutedGroup};
use horizon_core::transport::Completion;

/// What the model saw: for each step, position and token of every row.
pub type Steps = Arc<Mutex<Vec<Vec<(usize, u32)>>>>;

/// Of each step its phase, and whether only tokens were asked for.
pub type Asked = Arc<Mutex<Vec<(Phase, bool)>>>;

/// See the module's description.
pub struct ScriptedModel {
    vocab: u32,
    context: usize,
    /// Most likely token at a position, where the hash should not decide.
    script: Vec<(usize, u32)>,
    cache: Vec<(u32, bool)>,
    pending: Option<StepOutput>,
    steps: Steps,
    fail_at: Option<usize>,
    /// Whether the model chooses tokens itself where only they are asked for, and gives no logits then.
    chooses: bool,
    /// Phase, and whether only tokens were asked for, of every step.
    asked: Asked,
    /// Position and token that the last step's logits ask for.
    expected: Option<(usize, u32)>,
}

impl ScriptedModel {
    /// A model that follows `script`, pairs of position and next token, and a hash elsewhere.
    pub fn new(vocab: u32, context: usize, script: &[(usize, u32)]) -> (Self, Steps) {
        let steps = Steps::default();
        let model = Self {
            vocab,
            context,
            script: script.to_vec(),
            cache: Vec::new(),
            pending: None,
            steps: steps.clone(),
            fail_at: None,
            chooses: false,
            asked: Arc::default(),
            expected: None,
        };
        (model, steps)
    }

    /// Makes the step that reaches `position` fail, once.
    pub fn failing_at(mut self, position: usize) -> Self {
        self.fail_at = Some(position);
        self
    }

    /// Makes it choose tokens as a device does; what it was asked for.
    pub fn choosing(mut self) -> (Self, Asked) {
        self.chooses = true;
        let asked = self.asked.clone();
        (self, asked)
    }

    fn next_token(&self, position: usize) -> u32 {
        if let Some((_, token)) = self.script.iter().find(|(p, _)| *p == position) {
            return *token;
        }
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for (token, by_decode) in &self.cache[..=position] {
            hash = (hash ^ (u64::from(*token) << 1 | u64::from(*by_decode))).wrapping_mul(0x100_0000_01b3);
        }
        u32::try_from((hash >> 32) % u64::from(self.vocab)).expect("below vocab")
    }
}

impl CompiledModel for ScriptedModel {
    fn executor(&self) -> ExecutorId {
        ExecutorId("scripted")
    }

    fn enqueue(&mut self, batch: &StepBatch, _: &Arc<dyn ExpertProvider>) -> Result<Ticket, StepError> {
        assert!(self.pending.is_none(), "a step is in flight");
        let rows = &batch.rows;
        if self.fail_at.is_some_and(|p| rows.iter().any(|r| r.position == p)) {
            self.fail_at = None;
            return Err(StepError::Invalid("made to fail".into()));
        }
        self.steps
            .lock()
            .expect("no panic")
            .push(rows.iter().map(|r| (r.position, r.token)).collect());
        self.asked
            .lock()
            .expect("no panic")
            .push((batch.phase, batch.tokens_only));
        let (mut logits, mut tokens) = (Vec::new(), Vec::new());
        for row in rows {
            assert!(
                row.position <= self.cache.len() && row.position < self.context,
                "{row:?}"
            );
            assert!(row.token < self.vocab);
            self.cache.truncate(row.position);
            let by_decode = rows.len() == 1 && self.expected == Some((row.position, row.token));
            self.cache.push((row.token, by_decode));
            if row.logits {
                let best = self.next_token(row.position);
                tokens.push(best);
                self.expected = Some((row.position + 1, best));
                logits.extend((0..self.vocab).map(|t| if t == best { 2.0 } else { 0.0 }));
            }
        }
        if self.chooses && batch.tokens_only {
            logits.clear();
        }
        let report = StepReport {
            routed: rows.len() as u64,
            records: 1,
        };
        self.pending = Some(StepOutput {
            logits,
            tokens,
            report,
            ..StepOutput::default()
        });
        Ok(Ticket(1))
    }

    fn finish(&mut self, ticket: Ticket) -> Result<StepOutput, StepError> {
        self.pending.take().ok_or(StepError::UnknownTicket(ticket.0))
    }
}

/// A provider that is never asked.
pub struct NoProvider;

impl ExpertProvider for NoProvider {
    fn capture(&self) -> Hold {
        unreachable!("the scripted model routes nothing")
    }

    fn waves(&self, _: &Hold, _: &RoutedGroup<'_>) -> Vec<Vec<ExpertId>> {
        unreachable!("the scripted model routes nothing")
    }

    fn acquire(
        &self,
        _: &mut Hold,
        _: &RoutedGroup<'_>,
        _: Completion,
    ) -> Result<Box<dyn GroupLease>, AcquireError> {
        unreachable!("the scripted model routes nothing")
    }

    fn release(&self, _: Hold, _: Completion) {
        unreachable!("the scripted model routes nothing")
    }
}
