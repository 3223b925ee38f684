//! Shapes of published models, and the recipe of a model with such a shape.

use super::SyntheticError;
use super::recipe::{NOISE_STD, Recipe, TensorRule};
use crate::roles::{DenseRole, ExpertMatrix, ExpertRole, LayerRole, dense_tensors, expert_tensors};
use crate::spec::{
    AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm, SharedExpertSpec, SpecError,
};

/// Whose names and configuration keys a synthetic checkpoint uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the families'")]
pub enum ShapeFamily {
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
    Mixtral,
}

/// Sizes of a model, every layer a mixture of experts. All fields may be changed, for a smaller model.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Name of the shape, part of the checkpoint's title.
    pub name: String,
    /// The family.
    pub family: ShapeFamily,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head; `None`: `hidden / heads`. Only Qwen3-MoE can say it.
    pub head_dim: Option<usize>,
    /// Routed experts a layer.
    pub experts: usize,
    /// Experts a token uses.
    pub top_k: usize,
    /// Rows of an expert's gate and up matrices.
    pub width: usize,
    /// Rows of the shared expert's gate and up matrices (Qwen2-MoE only, where it must be positive).
    pub shared_width: usize,
    /// Vocabulary; at least 259, which the byte-level tokenizer needs.
    pub vocab: usize,
    /// Longest sequence.
    pub context: usize,
}

/// Bytes, and the three special tokens of the tokenizer.
pub(super) const TOKENS: usize = 256 + 3;

impl Shape {
    /// Names that [`Shape::named`] knows.
    pub const NAMES: [&'static str; 4] = ["olmoe", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "mixtral-8x7b"];

    /// The shape of a published model.
    ///
    /// # Errors
    /// [`SyntheticError::UnknownShape`] with the names that exist.
    pub fn named(name: &str) -> Result<Self, SyntheticError> {
        let base = Self {
            name: name.to_owned(),
            family: ShapeFamily::Olmoe,
            hidden: 2048,
            layers: 16,
            heads: 16,
            kv_heads: 16,
            head_dim: None,
            experts: 64,
            top_k: 8,
            width: 1024,
            shared_width: 0,
            vocab: 50304,
            context: 4096,
        };
        match name {
            "olmoe" => Ok(base),
            "qwen1.5-moe-a2.7b" => Ok(Self {
                family: ShapeFamily::Qwen2Moe,
                layers: 24,
                experts: 60,
                top_k: 4,
                width: 1408,
                shared_width: 5632,
                vocab: 151_936,
                context: 8192,
                ..base
            }),
            "qwen3-30b-a3b" => Ok(Self {
                family: ShapeFamily::Qwen3Moe,
                layers: 48,
                heads: 32,
                kv_heads: 4,
                head_dim: Some(128),
                experts: 128,
                width: 768,
                vocab: 151_936,
                context: 40960,
                ..base
            }),
            "mixtral-8x7b" => Ok(Self {
                family: ShapeFamily::Mixtral,
                hidden: 4096,
                layers: 32,
                heads: 32,
                kv_heads: 8,
                experts: 8,
                top_k: 2,
                width: 14336,
                vocab: 32000,
                context: 32768,
                ..base
            }),
            _ => Err(SyntheticError::UnknownShape {
                name: name.to_owned(),
                known: Self::NAMES.join(", "),
            }),
        }
    }

    /// Base of the rotary frequencies.
    pub(super) fn rope_theta(&self) -> f64 {
        if self.family == ShapeFamily::Olmoe {
            10_000.0
        } else {
            1_000_000.0
        }
    }

    /// Epsilon of the RMS norms.
    pub(super) fn rms_norm_eps(&self) -> f64 {
        match self.family {
            ShapeFamily::Olmoe | ShapeFamily::Mixtral => 1e-5,
            ShapeFamily::Qwen2Moe | ShapeFamily::Qwen3Moe => 1e-6,
        }
    }

    /// Whether the k probabilities are divided by their sum.
    pub(super) fn renormalize(&self) -> bool {
        matches!(self.family, ShapeFamily::Qwen3Moe | ShapeFamily::Mixtral)
    }

    /// The model as a specification.
    ///
    /// # Errors
    /// [`SyntheticError::Shape`] with the field that is out of range.
    pub fn model_spec(&self) -> Result<ModelSpec, SyntheticError> {
        let fail = |source| SyntheticError::Shape {
            name: self.name.clone(),
            source,
        };
        self.check().map_err(fail)?;
        let layer = LayerSpec {
            window: None,
            feed_forward: FeedForward::Moe(MoeSpec {
                experts: self.experts,
                top_k: self.top_k,
                width: self.width,
                renormalize: self.renormalize(),
                shared: (self.shared_width > 0).then_some(SharedExpertSpec {
                    width: self.shared_width,
                    gated: true,
                }),
            }),
        };
        let spec = ModelSpec {
            family: self.model_type().to_owned(),
            vocab: self.vocab,
            hidden: self.hidden,
            context: self.context,
            rms_norm_eps: self.rms_norm_eps() as f32,
            tied_embeddings: false,
            attention: AttentionSpec {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim.unwrap_or_else(|| self.hidden / self.heads),
                qk_norm: match self.family {
                    ShapeFamily::Olmoe => QkNorm::AllHeads,
                    ShapeFamily::Qwen3Moe => QkNorm::PerHead,
                    ShapeFamily::Qwen2Moe | ShapeFamily::Mixtral => QkNorm::None,
                },
                qkv_bias: self.family == ShapeFamily::Qwen2Moe,
                output_bias: false,
                clip_qkv: None,
                rope_theta: self.rope_theta(),
            },
            layers: vec![layer; self.layers.min(crate::spec::MAX_LAYERS + 1)],
        };
        spec.validate().map_err(fail)?;
        Ok(spec)
    }

    /// What the specification cannot know: limits of the tokenizer and of the family's configuration.
    fn check(&self) -> Result<(), SpecError> {
        let problem = |field, value: usize, problem: &str| {
            Err(SpecError {
                field,
                value: value.to_string(),
                problem: problem.to_owned(),
            })
        };
        if self.vocab < TOKENS {
            return problem(
                "vocab_size",
                self.vocab,
                "the byte-level tokenizer needs 259 tokens",
            );
        }
        match self.head_dim {
            None if self.heads == 0 || !self.hidden.is_multiple_of(self.heads) => {
                return problem("num_attention_heads", self.heads, "does not divide hidden_size");
            }
            Some(width) if self.family != ShapeFamily::Qwen3Moe => {
                return problem(
                    "head_dim",
                    width,
                    "only the Qwen3-MoE shape has a head_dim of its own",
                );
            }
            _ => {}
        }
        if (self.shared_width > 0) != (self.family == ShapeFamily::Qwen2Moe) {
            let text = "positive in the Qwen2-MoE shape, 0 in all others";
            return problem("shared_expert_intermediate_size", self.shared_width, text);
        }
        Ok(())
    }

    /// `model_type` of `config.json`.
    pub(super) fn model_type(&self) -> &'static str {
        match self.family {
            ShapeFamily::Olmoe => "olmoe",
            ShapeFamily::Qwen2Moe => "qwen2_moe",
            ShapeFamily::Qwen3Moe => "qwen3_moe",
            ShapeFamily::Mixtral => "mixtral",
        }
    }

    fn dense_name(&self, role: DenseRole) -> String {
        use LayerRole as L;
        let (layer, role) = match role {
            DenseRole::Embedding => return "model.embed_tokens.weight".into(),
            DenseRole::FinalNorm => return "model.norm.weight".into(),
            DenseRole::OutputHead => return "lm_head.weight".into(),
            DenseRole::Layer(layer, role) => (layer.0, role),
        };
        let block = self.expert_block();
        let rest = match role {
            L::AttentionNorm => "input_layernorm.weight",
            L::Query => "self_attn.q_proj.weight",
            L::QueryBias => "self_attn.q_proj.bias",
            L::QueryNorm => "self_attn.q_norm.weight",
            L::Key => "self_attn.k_proj.weight",
            L::KeyBias => "self_attn.k_proj.bias",
            L::KeyNorm => "self_attn.k_norm.weight",
            L::Value => "self_attn.v_proj.weight",
            L::ValueBias => "self_attn.v_proj.bias",
            L::Output => "self_attn.o_proj.weight",
            L::OutputBias => "self_attn.o_proj.bias",
            L::FeedForwardNorm => "post_attention_layernorm.weight",
            L::Router => return format!("model.layers.{layer}.{block}.gate.weight"),
            L::SharedGate => "mlp.shared_expert.gate_proj.weight",
            L::SharedUp => "mlp.shared_expert.up_proj.weight",
            L::SharedDown => "mlp.shared_expert.down_proj.weight",
            L::SharedExpertGate => "mlp.shared_expert_gate.weight",
            L::DenseGate => "mlp.gate_proj.weight",
            L::DenseUp => "mlp.up_proj.weight",
            L::DenseDown => "mlp.down_proj.weight",
        };
        format!("model.layers.{layer}.{rest}")
    }

    fn expert_name(&self, role: ExpertRole) -> String {
        let mixtral = self.family == ShapeFamily::Mixtral;
        let matrix = match role.matrix {
            ExpertMatrix::Gate if mixtral => "w1",
            ExpertMatrix::Up if mixtral => "w3",
            ExpertMatrix::Down if mixtral => "w2",
            ExpertMatrix::Gate => "gate_proj",
            ExpertMatrix::Up => "up_proj",
            ExpertMatrix::Down => "down_proj",
        };
        let (layer, expert) = (role.layer.0, role.expert.0);
        format!(
            "model.layers.{layer}.{}.experts.{expert}.{matrix}.weight",
            self.expert_block()
        )
    }

    fn expert_block(&self) -> &'static str {
        if self.family == ShapeFamily::Mixtral {
            "block_sparse_moe"
        } else {
            "mlp"
        }
    }
}

/// Standard deviation of the embedding. What a layer adds has about [`output_gain`] of the spread of its
/// input, averaged over positions or experts, so the token outweighs all layers together.
const EMBEDDING_STD: f64 = 1.0;
/// Standard deviation of `W·x` for an `x` of unit mean square: 0.02 · √2048, the usual initial spread at the
/// width of OLMoE.
const PRODUCT_STD: f64 = 0.905;
/// Largest damping factor of the matrices that write into the residual stream.
const OUTPUT_GAIN: f64 = 0.25;
/// Standard deviation of norm weights around 1, and of biases.
const SMALL_STD: f64 = 0.05;

/// Damping that keeps the sum over all layers small against the embedding, however many there are.
fn output_gain(layers: usize) -> f64 {
    OUTPUT_GAIN.min(1.0 / (layers as f64).sqrt())
}

/// Mean and standard deviation of a tensor of a model of so many layers.
fn spread(role: DenseRole, shape: &[usize], layers: usize) -> (f64, f64) {
    use LayerRole as L;
    let product = |gain: f64| (0.0, gain * PRODUCT_STD / (shape[shape.len() - 1] as f64).sqrt());
    match role {
        DenseRole::Embedding => (0.0, EMBEDDING_STD),
        DenseRole::FinalNorm
        | DenseRole::Layer(_, L::AttentionNorm | L::QueryNorm | L::KeyNorm | L::FeedForwardNorm) => {
            (1.0, SMALL_STD)
        }
        DenseRole::Layer(_, L::QueryBias | L::KeyBias | L::ValueBias | L::OutputBias) => (0.0, SMALL_STD),
        DenseRole::Layer(_, L::Output | L::SharedDown | L::DenseDown) => product(output_gain(layers)),
        _ => product(1.0),
    }
}

/// The values of a non-routed tensor.
pub(super) fn dense_rule(shape: &Shape, role: DenseRole, dims: Vec<usize>) -> TensorRule {
    let spread = spread(role, &dims, shape.layers);
    rule(shape.dense_name(role), dims, spread)
}

/// The values of an expert's matrix.
pub(super) fn expert_rule(shape: &Shape, role: ExpertRole) -> TensorRule {
    let (dims, gain) = match role.matrix {
        ExpertMatrix::Gate | ExpertMatrix::Up => (vec![shape.width, shape.hidden], 1.0),
        ExpertMatrix::Down => (vec![shape.hidden, shape.width], output_gain(shape.layers)),
    };
    let std = gain * PRODUCT_STD / (dims[1] as f64).sqrt();
    rule(shape.expert_name(role), dims, (0.0, std))
}

fn rule(name: String, shape: Vec<usize>, (mean, std): (f64, f64)) -> TensorRule {
    TensorRule {
        file: String::new(),
        name,
        shape,
        scale: (std / NOISE_STD) as f32,
        offset: mean as f32,
        outlier_every: 0,
    }
}

/// The tensors of a model with `shape`, layer by layer, cut into shards of at most `shard_bytes`.
pub(super) fn recipe(shape: &Shape, model: &ModelSpec, seed: u64, shard_bytes: u64) -> Recipe {
    let mut tensors = Vec::new();
    for (role, dims) in dense_tensors(model) {
        let layer = match role {
            DenseRole::Embedding => 0,
            DenseRole::Layer(layer, _) => layer.0 + 1,
            DenseRole::FinalNorm | DenseRole::OutputHead => u32::MAX,
        };
        tensors.push((layer, dense_rule(shape, role, dims)));
    }
    for role in expert_tensors(model) {
        tensors.push((role.layer.0 + 1, expert_rule(shape, role)));
    }
    tensors.sort_by_key(|(layer, _)| *layer);
    let mut tensors: Vec<TensorRule> = tensors.into_iter().map(|(_, rule)| rule).collect();
    assign_files(&mut tensors, shard_bytes);
    Recipe { seed, tensors }
}

fn assign_files(tensors: &mut [TensorRule], shard_bytes: u64) {
    let (mut shard, mut used) = (0, 0);
    let shards: Vec<usize> = tensors
        .iter()
        .map(|t| {
            let bytes = t.bytes() as u64;
            if used > 0 && used + bytes > shard_bytes {
                shard += 1;
                used = 0;
            }
            used += bytes;
            shard
        })
        .collect();
    let count = shard + 1;
    for (tensor, shard) in tensors.iter_mut().zip(shards) {
        tensor.file = match count {
            1 => "model.safetensors".into(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        };
    }
}
