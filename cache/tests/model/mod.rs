//! A small model with random weights, and text through it: what the tests of the cache compare.

use std::num::NonZeroUsize;
use std::sync::Arc;

use horizon_cache::Geometry;
use horizon_core::backend::{Activations, Backend, CompiledModel, Regime, StepBatch, StepError, StepRow};
use horizon_core::cpu::FastCpu;
use horizon_core::dense::DenseStore;
use horizon_core::image::ExpertImage;
use horizon_core::provider::{AcquireError, ExpertProvider, SlotMemory};
use horizon_core::qpacked::BlockSize;
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::{AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm};
use horizon_core::synthetic::RandomWeights;

/// Rows of a prefill step here: more tokens than any small capacity has experts for.
pub const CHUNK: usize = 16;
/// A prompt of a whole step and part of a second.
pub const PROMPT: [u32; 21] = [
    3, 200, 17, 17, 5, 99, 1, 0, 202, 64, 31, 8, 150, 77, 12, 13, 181, 44, 9, 9, 120,
];
/// Tokens decoded after the prompt.
const NEW: usize = 8;

/// Two layers with routed experts around one without.
pub fn spec(hidden: usize, experts: usize, top_k: usize, width: usize) -> ModelSpec {
    let moe = LayerSpec {
        window: None,
        feed_forward: FeedForward::Moe(MoeSpec {
            experts,
            top_k,
            width,
            renormalize: false,
            shared: None,
        }),
    };
    let dense = LayerSpec {
        window: None,
        feed_forward: FeedForward::Dense { width: 40 },
    };
    let spec = ModelSpec {
        family: "test".into(),
        vocab: 203,
        hidden,
        context: 64,
        rms_norm_eps: 1e-5,
        tied_embeddings: false,
        attention: AttentionSpec {
            heads: 2,
            kv_heads: 2,
            head_dim: 16,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            output_bias: false,
            clip_qkv: None,
            rope_theta: 1e4,
        },
        layers: vec![moe.clone(), dense, moe],
    };
    spec.validate().expect("a sound specification");
    spec
}

/// Weights in memory.
pub struct Model {
    pub spec: Arc<ModelSpec>,
    pub image: Arc<ExpertImage>,
    encoding: ExpertEncoding,
    dense: Arc<DenseStore>,
}

impl Model {
    /// Random weights of `seed`.
    pub fn new(spec: ModelSpec, block: BlockSize, seed: u64) -> Self {
        let encoding = ExpertEncoding::Qpacked { block };
        let layout = RecordLayout::new(&spec, encoding).expect("there are experts");
        let weights = RandomWeights(seed);
        let image = ExpertImage::load(&spec, &layout, FastCpu::tiling(), &weights).expect("loads");
        Self::of(spec, encoding, image, seed)
    }

    /// These experts, and random non-routed weights.
    pub fn of(spec: ModelSpec, encoding: ExpertEncoding, image: ExpertImage, seed: u64) -> Self {
        let dense = DenseStore::load(&spec, &RandomWeights(seed)).expect("loads");
        Self {
            spec: Arc::new(spec),
            image: Arc::new(image),
            encoding,
            dense: Arc::new(dense),
        }
    }

    pub fn geometry(&self, capacity: usize, spares: usize) -> Geometry {
        let moe = self.spec.moe().expect("there are experts");
        Geometry {
            layers: self.spec.moe_layers().collect(),
            experts: moe.experts,
            top_k: moe.top_k,
            capacity,
            spares,
        }
    }

    /// The model, executed from `slots` as `provider` directs.
    pub fn serve(&self, slots: Arc<dyn SlotMemory>, provider: Arc<dyn ExpertProvider>) -> Served {
        self.serve_on(2, slots, provider)
    }

    /// The same on so many threads.
    pub fn serve_on(
        &self,
        threads: usize,
        slots: Arc<dyn SlotMemory>,
        provider: Arc<dyn ExpertProvider>,
    ) -> Served {
        let backend = FastCpu::new(NonZeroUsize::new(threads), slots, self.encoding).expect("a few threads");
        let regime = Regime {
            activations: Activations::F16,
            context: 64,
            sequences: 1,
            max_rows: CHUNK,
        };
        let plan = backend.plan(&self.spec, &regime).expect("plans");
        let model = backend.open(&self.spec, &plan, &self.dense).expect("opens");
        Served {
            model,
            provider,
            tries: 3,
        }
    }
}

/// A model that runs.
pub struct Served {
    model: Box<dyn CompiledModel>,
    provider: Arc<dyn ExpertProvider>,
    /// Times that a step is tried whose experts could not be brought.
    pub tries: u32,
}

/// What came out: the bits of the logits of every position, and the tokens that were decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    pub logits: Vec<Vec<u32>>,
    pub tokens: Vec<u32>,
}

impl Served {
    /// One sequence from its beginning: the prompt in steps of up to [`CHUNK`] rows, then tokens one by one. A step
    /// whose experts could not be brought is tried again, [`tries`](Self::tries) times in all.
    pub fn text(&mut self) -> Text {
        let mut text = Text {
            logits: Vec::new(),
            tokens: Vec::new(),
        };
        for (i, chunk) in PROMPT.chunks(CHUNK).enumerate() {
            self.step(chunk, i * CHUNK, &mut text);
        }
        for i in 1..NEW {
            let last = *text.tokens.last().expect("every step gives one");
            self.step(&[last], PROMPT.len() + i - 1, &mut text);
        }
        text
    }

    fn step(&mut self, tokens: &[u32], start: usize, text: &mut Text) {
        let rows: Vec<StepRow> = (start..)
            .zip(tokens)
            .map(|(position, token)| StepRow {
                token: *token,
                position,
                sequence: 0,
                logits: true,
            })
            .collect();
        let count = rows.len();
        let batch = StepBatch {
            rows,
            taps: false,
            ..StepBatch::default()
        };
        let mut tries = self.tries;
        let ticket = loop {
            tries -= 1;
            match self.model.enqueue(&batch, &self.provider) {
                Ok(ticket) => break ticket,
                Err(StepError::Experts(AcquireError::Failed { .. })) if tries > 0 => {}
                Err(e) => panic!("{e}"),
            }
        };
        let out = self.model.finish(ticket).expect("finishes");
        let width = out.logits.len() / count;
        text.logits.extend(
            out.logits
                .chunks(width)
                .map(|l| l.iter().map(|v| v.to_bits()).collect()),
        );
        text.tokens.push(*out.tokens.last().expect("a row asked"));
    }
}

impl Text {
    /// Where two texts first part, if they do.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let positions = self.logits.iter().zip(&other.logits);
        for (position, (a, b)) in positions.enumerate() {
            if let Some(i) = (0..a.len().max(b.len())).find(|i| a.get(*i) != b.get(*i)) {
                let value = |x: &[u32]| x.get(i).map(|bits| f32::from_bits(*bits));
                return Some(format!(
                    "logit {i} of position {position}: {:?}, {:?}",
                    value(a),
                    value(b)
                ));
            }
        }
        (self != other).then(|| format!("tokens {:?}, {:?}", self.tokens, other.tokens))
    }
}
