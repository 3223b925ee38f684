//! Configurations of the golden checkpoints, both styles; settings one by one; and everything that must be refused.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use horizon_core::roles::{dense_tensors, expert_tensors};
use horizon_core::spec::{FeedForward, ModelSpec, QkNorm, SharedExpertSpec};
use horizon_models::config::ConfigError;
use horizon_models::family::{self, Resolved};
use serde_json::{Value, json};

const MODELS: [&str; 8] = [
    "mixtral-tiny",
    "olmoe-micro",
    "olmoe-tiny-a",
    "olmoe-tiny-b",
    "qwen2moe-micro",
    "qwen2moe-tiny-a",
    "qwen2moe-tiny-b",
    "qwen3moe-tiny",
];

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../runtime/tests/fixtures/goldens")
        .join(file)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(golden(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

fn config(file: &str) -> Value {
    serde_json::from_str(&read(file)).expect("JSON")
}

fn with(file: &str, changes: Value) -> Value {
    let mut config = config(file);
    for (key, value) in changes.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

fn without(mut config: Value, keys: &[&str]) -> Value {
    for key in keys {
        config
            .as_object_mut()
            .expect("an object")
            .shift_remove(*key)
            .expect("the key was there");
    }
    config
}

fn spec(config: &Value) -> ModelSpec {
    family::resolve(config).unwrap_or_else(|e| panic!("{e}")).spec
}

/// The specification of a configuration that has no key of which nothing is known.
fn known(config: &Value) -> ModelSpec {
    let resolved = family::resolve(config).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(resolved.unknown_keys, [""; 0], "{}", resolved.spec.family);
    resolved.spec
}

fn windows(config: &Value) -> Vec<Option<usize>> {
    spec(config).layers.iter().map(|l| l.window).collect()
}

/// Name and shape of every tensor that the specification asks for, against the list that the checkpoint was made from.
#[test]
fn golden_checkpoints_have_exactly_the_tensors_asked_for() {
    for model in MODELS {
        let Resolved { spec, names, .. } =
            family::resolve(&config(&format!("{model}/config.json"))).expect("resolves");
        let moe = spec.moe().expect("routes");
        let mut asked: BTreeMap<String, Vec<usize>> = dense_tensors(&spec)
            .into_iter()
            .map(|(role, shape)| (names.dense(role), shape))
            .collect();
        for role in expert_tensors(&spec) {
            use horizon_core::roles::ExpertMatrix::Down;
            let shape = if role.matrix == Down {
                [spec.hidden, moe.width]
            } else {
                [moe.width, spec.hidden]
            };
            assert_eq!(
                asked.insert(names.expert(role), shape.to_vec()),
                None,
                "a name used twice"
            );
        }
        let there: BTreeMap<String, Vec<usize>> = read(&format!("{model}/tensors.tsv"))
            .lines()
            .filter(|l| !l.starts_with('#'))
            .map(|line| {
                let fields: Vec<&str> = line.split('\t').collect();
                let shape = fields[2].split('x').map(|n| n.parse().expect("a size")).collect();
                (fields[1].to_owned(), shape)
            })
            .collect();
        assert_eq!(asked, there, "{model}");
    }
}

#[test]
fn both_styles_of_configuration_say_the_same() {
    for model in MODELS {
        let old = known(&config(&format!("{model}/config.json")));
        assert_eq!(old, known(&config(&format!("{model}/config_v5.json"))), "{model}");
    }
    for model in ["olmoe-micro", "qwen2moe-micro"] {
        let hub = known(&config(&format!("{model}/hub/config.json")));
        assert_eq!(hub, known(&config(&format!("{model}/config.json"))), "{model}");
    }
}

#[test]
fn keys_of_which_nothing_is_known_are_listed() {
    let unknown = |file: &str, changes| {
        family::resolve(&with(file, changes))
            .expect("resolves")
            .unknown_keys
    };
    // What is off is no setting; what another family means by a key is nothing to this one.
    let changes = json!({
        "zebra": 1, "aardvark": null, "badger": false, "_private": 3, "transformers_version": "9",
        "shared_expert_intermediate_size": 64, "id2label": {"0": "A"}, "new": {"a": 1},
    });
    assert_eq!(
        unknown("olmoe-tiny-a/config.json", changes),
        ["zebra", "shared_expert_intermediate_size", "new"]
    );
    // Nested ones where the object is known, and not twice.
    let rope =
        json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "beta_slow": 1, "x": null}});
    let unknown = unknown("olmoe-tiny-a/config_v5.json", rope);
    assert_eq!(unknown, ["rope_parameters.beta_slow"]);
}

#[test]
fn settings_of_each_family() {
    let a = spec(&config("olmoe-tiny-a/config.json"));
    assert_eq!(
        (a.attention.qk_norm, a.attention.clip_qkv, a.attention.rope_theta),
        (QkNorm::AllHeads, None, 1e4)
    );
    assert_eq!(
        (a.rms_norm_eps, a.context, a.vocab, a.tied_embeddings),
        (1e-5, 4096, 512, false)
    );
    let moe = a.moe().expect("routes");
    assert_eq!(
        (moe.experts, moe.top_k, moe.width, moe.renormalize),
        (8, 2, 256, false)
    );
    let b = spec(&config("olmoe-tiny-b/config.json"));
    assert_eq!(
        (b.attention.clip_qkv, b.attention.kv_heads, b.attention.rope_theta),
        (Some(8.0), 2, 5e5)
    );
    assert!(b.tied_embeddings && b.moe().expect("routes").renormalize);

    let q2 = spec(&config("qwen2moe-tiny-a/config.json"));
    assert!(q2.attention.qkv_bias && !q2.attention.output_bias);
    let shared = q2.moe().expect("routes").shared.clone();
    assert_eq!(
        shared,
        Some(SharedExpertSpec {
            width: 512,
            gated: true
        })
    );
    let mixed = spec(&config("qwen2moe-tiny-b/config.json"));
    let dense: Vec<bool> = mixed
        .layers
        .iter()
        .map(|l| matches!(l.feed_forward, FeedForward::Dense { width: 384 }))
        .collect();
    assert_eq!(dense, [true, false, true]);

    let q3 = spec(&config("qwen3moe-tiny/config.json"));
    assert_eq!(
        (q3.attention.qk_norm, q3.attention.head_dim, q3.attention.qkv_bias),
        (QkNorm::PerHead, 96, false)
    );
    assert!(q3.moe().expect("routes").renormalize && q3.moe().expect("routes").shared.is_none());
    let mixtral = spec(&config("mixtral-tiny/config.json"));
    assert!(mixtral.moe().expect("routes").renormalize);
    assert_eq!(mixtral.layers[0].window, None);
}

/// What an absent or null key means is what the configuration classes of transformers say.
#[test]
fn defaults_of_absent_keys() {
    for (model, theta, eps) in [
        ("olmoe-tiny-b", 1e4, 1e-5),
        ("qwen2moe-tiny-a", 1e4, 1e-6),
        ("qwen3moe-tiny", 1e4, 1e-6),
        ("mixtral-tiny", 1e6, 1e-5),
    ] {
        let full = config(&format!("{model}/config.json"));
        let s = spec(&without(
            full,
            &["rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act"],
        ));
        assert_eq!((s.attention.rope_theta, s.rms_norm_eps), (theta, eps), "{model}");
        assert!(!s.tied_embeddings);
        // With no base in either place, as with a base of null.
        let v5 = with(
            &format!("{model}/config_v5.json"),
            json!({"rope_parameters": {"rope_type": "default"}}),
        );
        assert_eq!(spec(&v5).attention.rope_theta, theta, "{model}");
        // Null key/value heads: as many as query heads.
        let null = with(
            &format!("{model}/config.json"),
            json!({"num_key_value_heads": null, "head_dim": null}),
        );
        let a = spec(&null).attention;
        assert_eq!((a.kv_heads, a.head_dim), (4, 64), "{model}");
    }
    let absent = |file: &str, keys: &[&str]| spec(&without(config(file), keys));
    assert_eq!(
        absent("olmoe-tiny-b/config.json", &["num_key_value_heads"])
            .attention
            .kv_heads,
        4
    );
    assert_eq!(
        absent("qwen3moe-tiny/config.json", &["num_key_value_heads"])
            .attention
            .kv_heads,
        4
    );
    let mixtral = with("mixtral-tiny/config.json", json!({"num_attention_heads": 32}));
    assert_eq!(
        spec(&without(mixtral, &["num_key_value_heads"]))
            .attention
            .kv_heads,
        8
    );
    for model in ["olmoe-tiny-b", "qwen2moe-tiny-b", "qwen3moe-tiny"] {
        let s = absent(&format!("{model}/config.json"), &["norm_topk_prob"]);
        assert!(!s.moe().expect("routes").renormalize, "{model}");
    }
    let q2 = with(
        "qwen2moe-tiny-b/config.json",
        json!({"qkv_bias": false, "decoder_sparse_step": null}),
    );
    let q2 = spec(&q2);
    assert!(!q2.attention.qkv_bias);
    assert_eq!(
        q2.layers.iter().map(|l| l.moe().is_some()).collect::<Vec<_>>(),
        [false, true, true]
    );
    for model in ["olmoe-tiny-a", "qwen3moe-tiny"] {
        let a = spec(&with(
            &format!("{model}/config.json"),
            json!({"attention_bias": true}),
        ))
        .attention;
        assert!(a.qkv_bias && a.output_bias, "{model}");
    }
}

#[test]
fn windows_follow_transformers_5() {
    let q2 = |changes| with("qwen2moe-tiny-b/config.json", changes);
    let (on, off) = (Some(32768), None);
    assert_eq!(windows(&q2(json!({"use_sliding_window": false}))), [off; 3]);
    assert_eq!(windows(&q2(json!({"use_sliding_window": true}))), [on, off, on]);
    assert_eq!(
        windows(&q2(json!({"use_sliding_window": true, "max_window_layers": 2}))),
        [on, off, off]
    );
    let types = json!(["full_attention", "sliding_attention", "full_attention"]);
    assert_eq!(
        windows(&q2(
            json!({"use_sliding_window": true, "layer_types": types, "sliding_window": 7})
        )),
        [off, Some(7), off]
    );
    let absent = without(q2(json!({"use_sliding_window": true})), &["sliding_window"]);
    assert_eq!(windows(&absent), [Some(4096), off, Some(4096)]);

    let q3 = |changes| with("qwen3moe-tiny/config.json", changes);
    assert_eq!(windows(&q3(json!({"sliding_window": 4096}))), [off; 2]);
    let both = json!({"sliding_window": 4096, "use_sliding_window": true, "max_window_layers": 0});
    assert_eq!(windows(&q3(both)), [Some(4096); 2]);
    for (window, layers) in [
        (json!(16), [Some(16); 2]),
        (json!(0), [None; 2]),
        (json!(null), [None; 2]),
    ] {
        assert_eq!(
            windows(&with(
                "mixtral-tiny/config.json",
                json!({"sliding_window": window})
            )),
            layers
        );
    }
}

#[test]
fn harmless_keys_are_ignored() {
    let noise = json!({
        "architectures": ["Whatever"], "auto_map": {"AutoModel": "x.Y"}, "_name_or_path": "/tmp", "use_cache": false,
        "attention_dropout": 0.5, "initializer_range": -1, "router_jitter_noise": 0.1, "torch_dtype": "float64",
        "pretraining_tp": 4, "some_future_key": {"a": [1, 2, 3]}, "rope_scaling": {"type": "default"},
        "partial_rotary_factor": 1.0, "mlp_bias": false, "quantization_config": null, "eos_token_id": [1, 2, 3],
    });
    for model in MODELS {
        let file = format!("{model}/config.json");
        assert_eq!(spec(&with(&file, noise.clone())), spec(&config(&file)), "{model}");
    }
    let swish = with(
        "olmoe-tiny-a/config.json",
        json!({"hidden_act": "swish", "num_local_experts": 8}),
    );
    assert_eq!(spec(&swish), spec(&config("olmoe-tiny-a/config.json")));
}

/// Each change of a good configuration is refused, and the message names the field.
#[test]
fn bad_configurations_name_the_field() {
    let o = "olmoe-tiny-a/config.json";
    let q2 = "qwen2moe-tiny-b/config.json";
    let q3 = "qwen3moe-tiny/config_v5.json";
    let m = "mixtral-tiny/config.json";
    let yarn = json!({"rope_type": "yarn", "factor": 4.0});
    let cases = [
        (o, "model_type", json!("llama")),
        (o, "model_type", json!(null)),
        (o, "model_type", json!(7)),
        (o, "num_experts", json!(0)),
        (o, "num_experts", json!(-8)),
        (o, "num_experts", json!(8.5)),
        (o, "num_experts", json!("8")),
        (o, "num_experts", json!(1_000_000)),
        (o, "num_experts_per_tok", json!(9)),
        (o, "num_experts_per_tok", json!(0)),
        (o, "num_experts_per_tok", json!(null)),
        (o, "intermediate_size", json!(0)),
        (o, "intermediate_size", json!(36)),
        (o, "hidden_size", json!(u64::MAX)),
        (o, "hidden_size", json!(256.0)),
        (o, "hidden_size", json!(250)),
        (o, "num_hidden_layers", json!(0)),
        (o, "num_hidden_layers", json!(10_000_000)),
        (o, "num_attention_heads", json!(0)),
        (o, "num_attention_heads", json!(3)),
        (o, "num_key_value_heads", json!(3)),
        (o, "num_key_value_heads", json!(0)),
        (o, "head_dim", json!(0)),
        (o, "head_dim", json!([64])),
        (o, "vocab_size", json!(0)),
        (o, "max_position_embeddings", json!(0)),
        (o, "rms_norm_eps", json!(-1e-5)),
        (o, "rms_norm_eps", json!("1e-5")),
        (o, "rope_theta", json!(0)),
        (o, "rope_theta", json!(-1e4)),
        (o, "rope_scaling", yarn.clone()),
        (o, "rope_scaling", json!({"factor": 2.0})),
        (o, "rope_scaling", json!("linear")),
        (
            o,
            "rope_parameters",
            json!({"rope_theta": 5.0, "rope_type": "default"}),
        ),
        (o, "partial_rotary_factor", json!(0.5)),
        (o, "hidden_act", json!("gelu")),
        (o, "clip_qkv", json!(0.0)),
        (o, "clip_qkv", json!("8")),
        (o, "attention_bias", json!(1)),
        (o, "norm_topk_prob", json!("yes")),
        (o, "tie_word_embeddings", json!(0)),
        (
            o,
            "quantization_config",
            json!({"quant_method": "gptq", "bits": 4}),
        ),
        (o, "num_local_experts", json!(16)),
        (o, "layer_types", json!(["sliding_attention", "full_attention"])),
        (o, "attention_multiplier", json!(0.5)),
        (o, "routed_scaling_factor", json!(2.5)),
        (o, "scoring_func", json!("sigmoid")),
        (o, "final_logit_softcapping", json!(30.0)),
        (q2, "decoder_sparse_step", json!(0)),
        (q2, "decoder_sparse_step", json!(4)),
        (q2, "mlp_only_layers", json!([0, 1, 2])),
        (q2, "mlp_only_layers", json!([-1])),
        (q2, "mlp_only_layers", json!(0)),
        (q2, "moe_intermediate_size", json!(0)),
        (q2, "shared_expert_intermediate_size", json!(0)),
        (q2, "shared_expert_intermediate_size", json!(null)),
        (q2, "intermediate_size", json!(null)),
        (q2, "clip_qkv", json!(8.0)),
        (q2, "layer_types", json!(["full_attention"])),
        (
            q2,
            "layer_types",
            json!(["full_attention", "linear_attention", "full_attention"]),
        ),
        (q2, "sliding_window", json!(-1)),
        (q2, "use_sliding_window", json!("true")),
        (q3, "num_local_experts", json!(0)),
        (q3, "num_local_experts", json!(null)),
        (q3, "rope_parameters", yarn),
        (
            q3,
            "rope_parameters",
            json!({"full_attention": {"rope_theta": 1e6}}),
        ),
        (
            q3,
            "rope_parameters",
            json!({"rope_theta": 1e6, "partial_rotary_factor": 0.25}),
        ),
        (m, "num_local_experts", json!(0)),
        (m, "intermediate_size", json!(-1)),
        (m, "sliding_window", json!(4096.5)),
    ];
    for (file, field, value) in cases {
        let error = match field {
            // A window that is never looked at is not checked.
            "sliding_window" => with(file, json!({field: value, "use_sliding_window": true})),
            _ => with(file, json!({field: value})),
        };
        let error = family::resolve(&error).expect_err(field).to_string();
        let named = if value.is_null() && field != "model_type" && field.ends_with("experts") {
            error.contains("num_experts")
        } else {
            error.contains(field)
        };
        assert!(
            named && error.starts_with("config.json: "),
            "{field} = {value}: {error}"
        );
    }
}

#[test]
fn unknown_families_and_other_documents() {
    let error = family::resolve(&with(
        "olmoe-tiny-a/config.json",
        json!({"model_type": "deepseek_v3"}),
    ));
    let text = error.expect_err("unknown").to_string();
    for name in ["deepseek_v3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"] {
        assert!(text.contains(name), "{text}");
    }
    assert!(matches!(
        family::resolve(&json!([])),
        Err(ConfigError::NotAnObject("a list"))
    ));
    assert!(matches!(
        family::resolve(&json!({})),
        Err(ConfigError::UnknownFamily { .. })
    ));
    assert!(matches!(
        horizon_models::config::parse(b"{"),
        Err(ConfigError::Json(_))
    ));
    // A sliding layer with nothing to slide by.
    let types = json!(["sliding_attention", "full_attention", "full_attention"]);
    let error = family::resolve(&with(
        "qwen2moe-tiny-b/config.json",
        json!({"layer_types": types}),
    ));
    assert!(
        error
            .expect_err("no window")
            .to_string()
            .contains("sliding_window")
    );
}
