//! Small checkpoints made in the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use half::{bf16, f16};
use horizon_core::artifact::Progress;
use horizon_core::roles::{ExpertMatrix, dense_tensors, expert_tensors};
use horizon_core::spec::ModelSpec;
use horizon_models::family;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// A checkpoint before it has a form: values that every element type holds exactly.
#[derive(Clone)]
pub struct Tiny {
    pub config: Value,
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Tiny {
    /// An OLMoE whose blocks have short tails: hidden 72, expert width 40, 2 layers of 3 experts.
    pub fn olmoe() -> Self {
        Self::new(json!({
            "model_type": "olmoe", "vocab_size": 48, "hidden_size": 72, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "num_experts": 3,
            "num_experts_per_tok": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "norm_topk_prob": false, "tie_word_embeddings": false, "hidden_act": "silu",
            "clip_qkv": null, "attention_bias": false,
        }))
    }

    /// A Qwen2-MoE with biases, a shared expert, a dense first layer and tied embeddings.
    pub fn qwen2() -> Self {
        Self::new(json!({
            "model_type": "qwen2_moe", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96,
            "moe_intermediate_size": 56, "shared_expert_intermediate_size": 88, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "norm_topk_prob": true,
            "tie_word_embeddings": true, "hidden_act": "silu", "mlp_only_layers": [0], "decoder_sparse_step": 1,
            "use_sliding_window": false,
        }))
    }

    fn new(config: Value) -> Self {
        let resolved = family::resolve(&config).expect("a configuration that can be run");
        let mut tensors = BTreeMap::new();
        let mut add = |name: String, shape: Vec<usize>| {
            let seed: usize = name.bytes().map(usize::from).sum();
            // Multiples of 1/256 below 1/2: exact in BF16, F16 and F32.
            let value = |i: usize| ((i * 7919 + seed * 31 + i / 13) % 255) as f32 / 256.0 - 127.0 / 256.0;
            let values = (0..shape.iter().product()).map(value).collect();
            tensors.insert(name, (shape, values));
        };
        for (role, shape) in dense_tensors(&resolved.spec) {
            add(resolved.names.dense(role), shape);
        }
        for role in expert_tensors(&resolved.spec) {
            add(
                resolved.names.expert(role),
                expert_shape(&resolved.spec, role.matrix),
            );
        }
        Self { config, tensors }
    }

    /// Changes one value of a tensor.
    pub fn set(&mut self, name: &str, index: usize, value: f32) {
        self.tensors.get_mut(name).expect("a tensor of the checkpoint").1[index] = value;
    }

    /// The bytes of one safetensors file with the tensors that `keep` accepts.
    pub fn weights(&self, dtype: Dtype, keep: impl Fn(&str) -> bool) -> Vec<u8> {
        let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, (shape, values))| (name, shape, encode(dtype, values)))
            .collect();
        let views = bytes
            .iter()
            .map(|(n, s, b)| (*n, TensorView::new(dtype, (*s).clone(), b).expect("consistent")));
        safetensors::serialize(views, None).expect("serializable")
    }

    /// Writes a checkpoint directory; `shards` above 1 adds an index.
    pub fn write(&self, dir: &Path, dtype: Dtype, shards: usize) {
        fs::create_dir_all(dir).expect("create");
        for (name, bytes) in self.files() {
            fs::write(dir.join(name), bytes).expect("write");
        }
        if shards == 1 {
            fs::write(dir.join("model.safetensors"), self.weights(dtype, |_| true)).expect("write");
            return;
        }
        let names: Vec<&String> = self.tensors.keys().collect();
        let shard_of = |name: &str| names.iter().position(|n| *n == name).expect("known") % shards;
        let file = |i: usize| format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
        for i in 0..shards {
            fs::write(dir.join(file(i)), self.weights(dtype, |n| shard_of(n) == i)).expect("write");
        }
        let map: BTreeMap<&String, String> = names.iter().map(|n| (*n, file(shard_of(n)))).collect();
        let index = json!({ "metadata": { "total_size": 0 }, "weight_map": map });
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("write");
    }

    /// The files beside the weights.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        BTreeMap::from([
            ("config.json".to_owned(), self.config.to_string().into_bytes()),
            ("tokenizer.json".to_owned(), b"{\"version\": \"1.0\"}".to_vec()),
            (
                "generation_config.json".to_owned(),
                b"{\"eos_token_id\": 0}".to_vec(),
            ),
            ("chat_template.jinja".to_owned(), "{{ 'ä' }}".as_bytes().to_vec()),
        ])
    }
}

fn expert_shape(spec: &ModelSpec, matrix: ExpertMatrix) -> Vec<usize> {
    let width = spec.moe().expect("routed experts").width;
    match matrix {
        ExpertMatrix::Gate | ExpertMatrix::Up => vec![width, spec.hidden],
        ExpertMatrix::Down => vec![spec.hidden, width],
    }
}

fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let each = |v: &f32| match dtype {
        Dtype::BF16 => bf16::from_f32(*v).to_le_bytes().to_vec(),
        Dtype::F16 => f16::from_f32(*v).to_le_bytes().to_vec(),
        Dtype::F32 => v.to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(*v).to_le_bytes().to_vec(),
        other => panic!("no checkpoint of {other:?} here"),
    };
    values.iter().flat_map(each).collect()
}

/// A temporary directory with a checkpoint of `tiny` in `hub`, and the path of an artifact to be.
pub fn scene(tiny: &Tiny, dtype: Dtype, shards: usize) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let hub = dir.path().join("hub");
    tiny.write(&hub, dtype, shards);
    let dest = dir.path().join("m.hz");
    (dir, hub, dest)
}

/// Every file of a directory.
pub fn files_in(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .expect("a directory")
        .map(|e| e.expect("an entry"))
        .map(|e| {
            (
                e.file_name().into_string().expect("UTF-8"),
                fs::read(e.path()).expect("readable"),
            )
        })
        .collect()
}

/// Remembers what it was told.
#[derive(Default)]
pub struct Told {
    pub total: Mutex<u64>,
    pub done: Mutex<u64>,
    pub notes: Mutex<Vec<String>>,
}

impl Progress for Told {
    fn begin(&self, _: &str, bytes: u64) {
        *self.total.lock().expect("no panic") = bytes;
    }

    fn advance(&self, bytes: u64) {
        *self.done.lock().expect("no panic") += bytes;
    }

    fn note(&self, text: &str) {
        self.notes.lock().expect("no panic").push(text.to_owned());
    }
}
