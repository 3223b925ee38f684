//! One suite for every backend: the cases, what counts as equal, and the walk through them.
//!
//! A backend crate opens each case its own way ([`Subject`]) and calls [`forward`]. Everything is compared with the
//! scalar reference under FP16 activations, stage by stage, so that a failure names its seed and the first stage
//! that disagrees.

mod cases;
mod compare;

use std::sync::Arc;

pub use cases::{Case, cases};
pub use compare::{Disagreement, Tolerance};

use crate::backend::{Activations, Backend, CompiledModel, Phase, Regime, StepBatch, StepOutput, StepRow};
use crate::cpu::ReferenceCpu;
use crate::dense::{DenseFormat, DenseStore};
use crate::image::ExpertImage;
use crate::provider::{ExpertProvider, FullyResident};
use crate::record::{RecordLayout, RecordTiling};
use crate::synthetic::RandomWeights;

/// A model that is ready to run, and where its experts come from.
pub struct Opened {
    /// Model.
    pub model: Box<dyn CompiledModel>,
    /// Experts.
    pub experts: Arc<dyn ExpertProvider>,
}

/// A backend under test.
pub trait Subject {
    /// Opens a case: weights are [`RandomWeights`] of `seed`, experts tiled as the backend wants them.
    fn open(&self, case: &Case, dense: DenseFormat, regime: &Regime, seed: u64) -> Opened;

    /// What counts as equal.
    fn tolerance(&self) -> Tolerance;
}

/// The experts of a case in a backend's tiling.
///
/// # Panics
/// When they cannot be had.
#[must_use]
pub fn image(case: &Case, tiling: &dyn RecordTiling, seed: u64) -> Arc<ExpertImage> {
    let layout = RecordLayout::new(&case.spec, case.encoding).expect("every case has experts");
    let random = RandomWeights(seed);
    Arc::new(ExpertImage::load(&case.spec, &layout, tiling, &random).expect("random weights load"))
}

/// The non-routed weights of a case.
///
/// # Panics
/// When they cannot be had.
#[must_use]
pub fn dense(case: &Case, format: DenseFormat, seed: u64) -> Arc<DenseStore> {
    Arc::new(DenseStore::load_as(&case.spec, format, &RandomWeights(seed)).expect("random weights load"))
}

/// The reference, opened.
///
/// # Panics
/// When it cannot be opened.
#[must_use]
pub fn reference(case: &Case, format: DenseFormat, activations: Activations, seed: u64) -> Opened {
    let regime = &Regime {
        activations,
        ..regime()
    };
    let image = image(case, ReferenceCpu::tiling(), seed);
    let backend = ReferenceCpu::new(image.clone(), case.encoding);
    let plan = backend.plan(&case.spec, regime).expect("plans");
    let spec = Arc::new(case.spec.clone());
    let model = backend
        .open(&spec, &plan, &dense(case, format, seed))
        .expect("opens");
    Opened {
        model,
        experts: Arc::new(FullyResident::new(image)),
    }
}

/// What cases are opened for.
#[must_use]
pub fn regime() -> Regime {
    Regime {
        activations: Activations::F16,
        context: 96,
        sequences: 2,
        max_rows: 24,
    }
}

/// Runs `tokens` from position `start` of `sequence`.
///
/// # Panics
/// When the step fails.
pub fn step(
    o: &mut Opened,
    phase: Phase,
    tokens: &[u32],
    start: usize,
    sequence: usize,
    taps: bool,
) -> StepOutput {
    let row = |(i, token): (usize, &u32)| StepRow {
        token: *token,
        position: start + i,
        sequence,
        logits: true,
    };
    run(o, phase, tokens.iter().enumerate().map(row).collect(), taps)
}

fn run(o: &mut Opened, phase: Phase, rows: Vec<StepRow>, taps: bool) -> StepOutput {
    let batch = StepBatch {
        rows,
        taps,
        phase,
        tokens_only: false,
    };
    let ticket = o.model.enqueue(&batch, &o.experts).expect("enqueues");
    o.model.finish(ticket).expect("finishes")
}

/// Tokens that repeat neither quickly nor evenly.
///
/// # Panics
/// When the vocabulary is 0 or does not fit 32 bits.
#[must_use]
pub fn tokens(count: usize, vocab: usize, seed: u64) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            u32::try_from(state % vocab as u64).expect("vocabularies are small")
        })
        .collect()
}

/// Rows of the prompt's steps.
const CHUNKS: [usize; 3] = [1, 7, 16];
/// Rows of the same prompt's steps when it is cut otherwise.
const OTHER_CHUNKS: [usize; 2] = [10, 14];
/// Prompt and what is decoded after it; the last positions are beyond a multiple of 32.
const LENGTH: usize = 34;
/// Positions decoded once more, beside another sequence.
const BESIDE: usize = 4;

/// Compares a backend with the reference on a case: a prompt in one step and in uneven chunks, then token by token, with
/// every stage; then bits: repeated, beside another sequence, cut otherwise.
///
/// # Panics
/// With the case, the seed and the first stage that disagrees.
pub fn forward(subject: &dyn Subject, case: &Case, format: DenseFormat, seed: u64) {
    case.spec.validate().expect("a sound case");
    let mut walk = Walk {
        case,
        format,
        seed,
        tolerance: subject.tolerance(),
        text: tokens(LENGTH, case.spec.vocab, seed),
        reference16: reference(case, format, Activations::F16, seed),
        reference32: reference(case, format, Activations::F32, seed),
        opened: subject.open(case, format, &regime(), seed),
    };
    let prompt = walk.prompt();
    let decoded = walk.decode(CHUNKS.iter().sum());
    walk.prompt_cut_otherwise(&prompt);
    walk.decode_beside_another(CHUNKS.iter().sum(), &decoded);
}

/// A case on its way through the reference and the backend under test.
struct Walk<'a> {
    case: &'a Case,
    format: DenseFormat,
    seed: u64,
    tolerance: Tolerance,
    text: Vec<u32>,
    reference16: Opened,
    reference32: Opened,
    opened: Opened,
}

impl Walk<'_> {
    fn context(&self, at: &str) -> String {
        let (case, dense, seed) = (self.case.name, self.format.name(), self.seed);
        format!("case '{case}', dense {dense}, seed {seed}, {at}")
    }

    /// Logits of `count` rows from position `start`, after they were compared.
    fn compared(&mut self, phase: Phase, start: usize, count: usize, taps: bool) -> Vec<f32> {
        let part = &self.text[start..start + count];
        let want = step(&mut self.reference16, phase, part, start, 0, taps);
        let exact = step(&mut self.reference32, phase, part, start, 0, taps);
        let got = step(&mut self.opened, phase, part, start, 0, taps);
        let at = match phase {
            Phase::Prefill => "prompt",
            Phase::Decode => "decode",
        };
        self.tolerance
            .outputs(&want, &exact, &got, count)
            .unwrap_or_else(|d| panic!("{}: {d}", self.context(at)));
        got.logits
    }

    /// A prompt in uneven chunks.
    fn prompt(&mut self) -> Vec<f32> {
        let mut start = 0;
        let mut logits = Vec::new();
        for count in CHUNKS {
            logits.extend(self.compared(Phase::Prefill, start, count, true));
            start += count;
        }
        logits
    }

    /// Token by token, both phases' caches continued.
    fn decode(&mut self, start: usize) -> Vec<f32> {
        (start..self.text.len())
            .flat_map(|position| self.compared(Phase::Decode, position, 1, position % 8 == 0))
            .collect()
    }

    fn prompt_cut_otherwise(&mut self, want: &[f32]) {
        let mut start = 0;
        let mut logits = Vec::new();
        for count in OTHER_CHUNKS {
            let part = &self.text[start..start + count];
            logits.extend(step(&mut self.opened, Phase::Prefill, part, start, 0, false).logits);
            start += count;
        }
        assert_eq!(
            bits(&logits),
            bits(want),
            "{}",
            self.context("prompt cut otherwise")
        );
    }

    fn decode_beside_another(&mut self, start: usize, want: &[f32]) {
        const OTHER_PROMPT: usize = 3;
        let vocab = self.case.spec.vocab;
        let other = tokens(OTHER_PROMPT + BESIDE, vocab, self.seed + 1);
        let _ = step(
            &mut self.opened,
            Phase::Prefill,
            &other[..OTHER_PROMPT],
            0,
            1,
            false,
        );
        let mut beside = Vec::new();
        for i in 0..BESIDE {
            let row = |sequence, token, position| StepRow {
                token,
                position,
                sequence,
                logits: true,
            };
            let rows = vec![
                row(1, other[OTHER_PROMPT + i], OTHER_PROMPT + i),
                row(0, self.text[start + i], start + i),
            ];
            let out = run(&mut self.opened, Phase::Decode, rows, false);
            beside.extend_from_slice(&out.logits[vocab..]);
        }
        assert_eq!(
            bits(&beside),
            bits(&want[..BESIDE * vocab]),
            "{}",
            self.context("decode beside another sequence")
        );
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
