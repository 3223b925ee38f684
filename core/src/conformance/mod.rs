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

/// Compares a backend with the reference on a case: a prompt in one step and in uneven chunks, then token by token, with
/// every stage; then bits: repeated, beside another sequence, cut otherwise.
///
/// # Panics
/// With the case, the seed and the first stage that disagrees.
pub fn forward(subject: &dyn Subject, case: &Case, format: DenseFormat, seed: u64) {
    case.spec.validate().expect("a sound case");
    let regime = regime();
    let text = tokens(40, case.spec.vocab, seed);
    let mut reference16 = reference(case, format, Activations::F16, seed);
    let mut reference32 = reference(case, format, Activations::F32, seed);
    let mut opened = subject.open(case, format, &regime, seed);
    let tolerance = subject.tolerance();
    let name = case.name;
    let context = |at: &str| format!("case '{name}', dense {}, seed {seed}, {at}", format.name());

    // A prompt in uneven chunks.
    let mut prompt = Vec::new();
    let mut start = 0;
    for chunk in [1, 7, 16] {
        let part = &text[start..start + chunk];
        let want = step(&mut reference16, Phase::Prefill, part, start, 0, true);
        let exact = step(&mut reference32, Phase::Prefill, part, start, 0, true);
        let got = step(&mut opened, Phase::Prefill, part, start, 0, true);
        tolerance
            .outputs(&want, &exact, &got, part.len())
            .unwrap_or_else(|d| panic!("{}: {d}", context("prompt")));
        prompt.extend(got.logits);
        start += chunk;
    }
    // Token by token, both phases' caches continued.
    let mut decoded = Vec::new();
    for (position, token) in text.iter().enumerate().skip(start) {
        let want = step(
            &mut reference16,
            Phase::Decode,
            &[*token],
            position,
            0,
            position % 8 == 0,
        );
        let exact = step(
            &mut reference32,
            Phase::Decode,
            &[*token],
            position,
            0,
            position % 8 == 0,
        );
        let got = step(
            &mut opened,
            Phase::Decode,
            &[*token],
            position,
            0,
            position % 8 == 0,
        );
        tolerance
            .outputs(&want, &exact, &got, 1)
            .unwrap_or_else(|d| panic!("{}: {d}", context("decode")));
        decoded.extend(got.logits);
    }
    // The same bits: the prompt cut otherwise, and decode beside another sequence.
    let mut again = Vec::new();
    for (at, chunk) in [(0, 10), (10, 14)] {
        let part = &text[at..at + chunk];
        again.extend(step(&mut opened, Phase::Prefill, part, at, 0, false).logits);
    }
    assert_eq!(bits(&again), bits(&prompt), "{}", context("prompt cut otherwise"));
    let other = tokens(40, case.spec.vocab, seed + 1);
    let _ = step(&mut opened, Phase::Prefill, &other[..3], 0, 1, false);
    let mut beside = Vec::new();
    for position in start..text.len() {
        let row = |sequence, token, position| StepRow {
            token,
            position,
            sequence,
            logits: true,
        };
        let rows = vec![
            row(1, other[position - start + 3], position - start + 3),
            row(0, text[position], position),
        ];
        let out = run(&mut opened, Phase::Decode, rows, false);
        beside.extend_from_slice(&out.logits[case.spec.vocab..]);
    }
    assert_eq!(
        bits(&beside),
        bits(&decoded),
        "{}",
        context("decode beside another sequence")
    );
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}
