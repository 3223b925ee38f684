//! The text files of a synthetic checkpoint, in the style of published ones.

use serde_json::{Map, Value, json};

use super::shape::{Shape, ShapeFamily};

const END: u32 = 256;
const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|user|>", "<|assistant|>"];
const TEMPLATE: &str = "{% for message in messages %}{% if message['role'] == 'assistant' %}\
{{ '<|assistant|>' + message['content'] + '<|endoftext|>' }}{% else %}{{ '<|user|>' + message['content'] }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}";

/// Name and content of every text file.
pub(super) fn files(shape: &Shape, title: &str) -> [(&'static str, String); 4] {
    let pretty = |v: Value| format!("{v:#}\n");
    [
        ("config.json", pretty(config(shape, title))),
        (
            "generation_config.json",
            pretty(json!({"eos_token_id": END, "do_sample": false})),
        ),
        ("tokenizer.json", pretty(tokenizer())),
        ("tokenizer_config.json", pretty(tokenizer_config(shape))),
    ]
}

fn config(shape: &Shape, title: &str) -> Value {
    let architecture = match shape.family {
        ShapeFamily::Olmoe => "OlmoeForCausalLM",
        ShapeFamily::Qwen2Moe => "Qwen2MoeForCausalLM",
        ShapeFamily::Qwen3Moe => "Qwen3MoeForCausalLM",
        ShapeFamily::Mixtral => "MixtralForCausalLM",
    };
    let mut all = json!({
        "_name_or_path": title,
        "architectures": [architecture],
        "model_type": shape.model_type(),
        "eos_token_id": END,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.rms_norm_eps(),
        "rope_theta": shape.rope_theta(),
        "tie_word_embeddings": false,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab,
    });
    let own = match shape.family {
        ShapeFamily::Olmoe => json!({
            "attention_bias": false,
            "clip_qkv": null,
            "intermediate_size": shape.width,
            "norm_topk_prob": shape.renormalize(),
            "num_experts": shape.experts,
            "rope_scaling": null,
        }),
        ShapeFamily::Qwen2Moe => json!({
            "decoder_sparse_step": 1,
            "intermediate_size": shape.shared_width,
            "max_window_layers": 21,
            "moe_intermediate_size": shape.width,
            "norm_topk_prob": shape.renormalize(),
            "num_experts": shape.experts,
            "shared_expert_intermediate_size": shape.shared_width,
            "sliding_window": 32768,
            "use_sliding_window": false,
        }),
        ShapeFamily::Qwen3Moe => json!({
            "attention_bias": false,
            "decoder_sparse_step": 1,
            "head_dim": shape.head_dim.unwrap_or(shape.hidden / shape.heads.max(1)),
            "intermediate_size": shape.width * shape.top_k,
            "mlp_only_layers": [],
            "moe_intermediate_size": shape.width,
            "norm_topk_prob": shape.renormalize(),
            "num_experts": shape.experts,
            "rope_scaling": null,
            "sliding_window": null,
            "use_sliding_window": false,
        }),
        ShapeFamily::Mixtral => json!({
            "intermediate_size": shape.width,
            "num_local_experts": shape.experts,
            "sliding_window": null,
        }),
    };
    if let (Value::Object(all), Value::Object(own)) = (&mut all, own) {
        all.extend(own);
        all.sort_keys();
    }
    all
}

/// A byte-level BPE with no merges: token `b` is the byte `b`, then the special tokens.
fn tokenizer() -> Value {
    let vocab: Map<String, Value> = byte_characters()
        .zip(0u32..)
        .map(|(c, id)| (c.to_string(), id.into()))
        .collect();
    let added: Vec<Value> = (END..)
        .zip(SPECIAL)
        .map(|(id, text)| added_token(Some(id), text))
        .collect();
    let level = |prefix| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": level(false),
        "post_processor": null,
        "decoder": level(true),
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "vocab": vocab,
            "merges": [],
        },
    })
}

fn tokenizer_config(shape: &Shape) -> Value {
    let decoder: Map<String, Value> = (END..)
        .zip(SPECIAL)
        .map(|(id, text)| (id.to_string(), added_token(None, text)))
        .collect();
    json!({
        "add_prefix_space": false,
        "added_tokens_decoder": decoder,
        "bos_token": null,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": false,
        "eos_token": SPECIAL[0],
        "model_max_length": shape.context,
        "pad_token": SPECIAL[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null,
    })
}

fn added_token(id: Option<u32>, text: &str) -> Value {
    let mut token = Map::new();
    if let Some(id) = id {
        token.insert("id".into(), id.into());
    }
    token.insert("content".into(), text.into());
    for key in ["single_word", "lstrip", "rstrip", "normalized"] {
        token.insert(key.into(), false.into());
    }
    token.insert("special".into(), true.into());
    Value::Object(token)
}

/// The printable character that stands for each byte in a byte-level vocabulary: itself where it is printable
/// and no blank, otherwise the next character from U+0100 on.
fn byte_characters() -> impl Iterator<Item = char> {
    let mut spare = '\u{100}'..;
    (0..=u8::MAX).map(move |b| match b {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(b),
        _ => spare.next().expect("there are 68 other bytes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let all: Vec<char> = byte_characters().collect();
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), 256);
        // Known from published vocabularies: blank, line feed, and the soft hyphen.
        assert_eq!((all[32], all[10], all[0xAD]), ('Ġ', 'Ċ', '\u{143}'));
    }
}
