//! One way of running a model: a backend, its arithmetic, and the form of the experts.

use std::collections::BTreeMap;
use std::sync::Arc;

use horizon_core::artifact::Silent;
use horizon_core::backend::{Activations, Backend, CompiledModel, Regime, StepBatch, StepOutput, StepRow};
use horizon_core::cpu::{FastCpu, ReferenceCpu};
use horizon_core::dense::DenseFormat;
use horizon_core::provider::{ExpertProvider, FullyResident};
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::stage::TapData;
use horizon_models::source::{ExpertsMode, LoadOptions, ModelSource};
use horizon_runtime::eval::{Evaluator, SequenceOutput};

/// Positions that the tests need.
const CONTEXT: usize = 512;
/// Rows of a step: fewer than the longest golden sequence, so that prefill takes several.
const ROWS: usize = 32;

/// Which backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    Reference,
    Fast,
}

/// One way of running a model.
#[derive(Clone, Copy, Debug)]
pub struct Arm {
    pub backend: Which,
    pub activations: Activations,
    pub experts: ExpertsMode,
    pub dense: DenseFormat,
}

/// Experts packed with `absmax`, as the goldens of the packed form are.
pub fn packed(block: BlockSize) -> ExpertsMode {
    ExpertsMode::Qpacked {
        block: Some(block),
        quantizer: Some(Quantizer::Absmax),
    }
}

impl Arm {
    /// Every backend with every arithmetic, for one form of the experts.
    pub fn all(experts: ExpertsMode) -> impl Iterator<Item = Self> {
        [Which::Reference, Which::Fast]
            .into_iter()
            .flat_map(move |backend| {
                [Activations::F32, Activations::F16].map(move |activations| Self {
                    backend,
                    activations,
                    experts,
                    dense: DenseFormat::F16,
                })
            })
    }

    /// The arithmetic, in the words of the tolerance file.
    pub fn arithmetic(&self) -> &'static str {
        match self.activations {
            Activations::F32 => "f32",
            Activations::F16 => "fp16",
        }
    }

    /// Brings a model into memory and opens it.
    pub fn open(&self, source: &ModelSource) -> Running {
        let options = LoadOptions {
            experts: self.experts,
            dense: self.dense,
            ..LoadOptions::default()
        };
        let tiling = match self.backend {
            Which::Reference => ReferenceCpu::tiling(),
            Which::Fast => FastCpu::tiling(),
        };
        let loaded = source
            .load(&options, tiling, &Silent)
            .unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let image = loaded.image.expect("every test model has routed experts");
        let backend: Box<dyn Backend> = match self.backend {
            Which::Reference => Box::new(ReferenceCpu::new(image.clone(), loaded.encoding)),
            Which::Fast => Box::new(FastCpu::new(None, image.clone(), loaded.encoding).expect("threads")),
        };
        let regime = Regime {
            activations: self.activations,
            context: CONTEXT.min(loaded.spec.context),
            sequences: 1,
            max_rows: ROWS,
        };
        let plan = backend.plan(&loaded.spec, &regime).expect("a plan");
        let model = backend.open(&loaded.spec, &plan, &loaded.dense).expect("opens");
        Running {
            model,
            experts: Arc::new(FullyResident::new(image)),
        }
    }
}

/// A model that runs.
pub struct Running {
    pub model: Box<dyn CompiledModel>,
    pub experts: Arc<dyn ExpertProvider>,
}

impl Running {
    /// For the measurements of `horizon_runtime::eval`.
    pub fn evaluator(&mut self) -> Evaluator<'_> {
        Evaluator {
            model: self.model.as_mut(),
            experts: &self.experts,
            chunk: ROWS,
        }
    }

    /// Runs a sequence from position 0, with every tap.
    pub fn sequence(&mut self, tokens: &[u32]) -> Outcome {
        Outcome::from(self.evaluator().sequence(tokens, true).expect("runs"))
    }

    /// Runs `tokens` from `position` on in one step; logits of the last row.
    pub fn step(&mut self, tokens: &[u32], position: usize) -> StepOutput {
        let rows = (position..)
            .zip(tokens)
            .map(|(at, token)| StepRow {
                token: *token,
                position: at,
                sequence: 0,
                logits: at + 1 == position + tokens.len(),
            })
            .collect();
        let ticket = self
            .model
            .enqueue(
                &StepBatch {
                    rows,
                    taps: false,
                    ..StepBatch::default()
                },
                &self.experts,
            )
            .expect("enqueues");
        self.model.finish(ticket).expect("finishes")
    }

    /// The most likely continuation, token by token, through every end of sequence.
    pub fn greedy(&mut self, prompt: &[u32], tokens: usize) -> Vec<u32> {
        let mut next = self.step(prompt, 0).tokens[0];
        let mut out = vec![next];
        while out.len() < tokens {
            next = self.step(&[next], prompt.len() + out.len() - 1).tokens[0];
            out.push(next);
        }
        out
    }
}

/// What a sequence gave, by the names of the golden files.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    pub real: BTreeMap<String, Vec<f32>>,
    pub integer: BTreeMap<String, Vec<i32>>,
}

impl From<SequenceOutput> for Outcome {
    fn from(output: SequenceOutput) -> Self {
        let mut all = Self::default();
        all.real.insert("logits".into(), output.logits);
        for (stage, (_, data)) in output.taps {
            match data {
                TapData::F32(v) => all.real.insert(stage.to_string(), v).map(drop),
                TapData::I32(v) => all.integer.insert(stage.to_string(), v).map(drop),
            };
        }
        all
    }
}

impl Outcome {
    /// The same, to the bit.
    pub fn bits(&self) -> impl PartialEq + std::fmt::Debug + use<> {
        let real: BTreeMap<String, Vec<u32>> = self
            .real
            .iter()
            .map(|(n, v)| (n.clone(), v.iter().map(|v| v.to_bits()).collect()))
            .collect();
        (real, self.integer.clone())
    }
}
