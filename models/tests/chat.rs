//! Chat templates against what jinja2 renders when it is set up as Hugging Face transformers does it.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use horizon_models::chat::{ChatError, ChatFiles, ChatTemplate, Message, RenderOptions};
use horizon_models::tokenizer::Tokenizer;
use serde_json::{Value, json};

fn read(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn json_file(name: &str) -> Value {
    serde_json::from_slice(&read(name)).expect("JSON")
}

fn tokens(of: &Value) -> Vec<(String, Value)> {
    let named = ["bos_token", "eos_token"].map(|name| (name.to_owned(), of[name].clone()));
    named.into_iter().filter(|(_, v)| !v.is_null()).collect()
}

#[test]
fn recorded_conversations() {
    let goldens = json_file("tests/fixtures/tokenizer-olmo/chat_goldens.json");
    let packed = read("tests/fixtures/tokenizer-olmo/tokenizer.json.zst");
    let tokenizer = Tokenizer::from_bytes(&zstd::decode_all(&packed[..]).expect("zstd")).expect("loads");
    let cases = goldens["cases"].as_array().expect("cases");
    assert!(cases.len() >= 30);
    for case in cases {
        let given = &goldens["templates"][case["template"].as_str().expect("a name")];
        let template =
            ChatTemplate::new(given["template"].as_str().expect("text"), tokens(given)).expect("compiles");
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).expect("messages");
        let options = RenderOptions {
            add_generation_prompt: case["add_generation_prompt"] == true,
            ..RenderOptions::default()
        };
        let text = template.render(&messages, &options).expect("renders");
        assert_eq!(text, case["rendered"], "{case}");
        if let Some(ids) = case["ids"].as_array() {
            assert_eq!(
                &json!(tokenizer.encode(&text, false).expect("encodes")),
                &json!(ids)
            );
        }
    }
}

#[test]
fn dialect() {
    let fixture = json_file("tests/fixtures/chat-dialect/cases.json");
    let tokens: Vec<(String, Value)> =
        serde_json::from_value::<serde_json::Map<_, _>>(fixture["tokens"].clone())
            .expect("tokens")
            .into_iter()
            .collect();
    let options = RenderOptions {
        add_generation_prompt: true,
        variables: fixture["variables"].as_object().expect("variables").clone(),
        now: Some(UNIX_EPOCH + Duration::from_secs(fixture["now"].as_u64().expect("seconds"))),
    };
    let messages = fixture["messages"].as_array().expect("messages");
    let mut wrong = Vec::new();
    for case in fixture["cases"].as_array().expect("cases") {
        let source = case["template"].as_str().expect("text");
        let got = ChatTemplate::new(source, tokens.clone()).and_then(|t| t.render(messages, &options));
        match (&got, case["text"].as_str()) {
            (Ok(got), Some(want)) if got == want => {}
            (Err(_), None) => {}
            (got, want) => wrong.push(format!("{source}\n  want {want:?}\n  got  {got:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_demo_model_chats() {
    let files = ChatFiles {
        tokenizer_config: Some(&read("assets/stories-olmoe/tokenizer_config.json")),
        special_tokens_map: Some(&read("assets/stories-olmoe/special_tokens_map.json")),
        chat_template: None,
    };
    let template = ChatTemplate::from_files(&files).expect("has a template");
    let conversation = [
        Message::new("user", "Hi."),
        Message::new("assistant", "Yes?"),
        Message::new("user", "A story."),
    ];
    assert_eq!(
        template
            .render(&conversation, &RenderOptions::answer())
            .expect("renders"),
        "<|user|>\nHi.\n<|assistant|>\nYes?<|endoftext|>\n<|user|>\nA story.\n<|assistant|>\n"
    );
    assert_eq!(
        files.special_token("eos_token").expect("reads").as_deref(),
        Some("<|endoftext|>")
    );
    assert_eq!(files.special_token("bos_token").expect("reads"), None);
}

/// All the places in which checkpoints keep a template and special tokens, and which one wins.
#[test]
fn files_of_a_checkpoint() {
    let render = |config: Value, map: Value, jinja: Option<&str>| {
        let (config, map) = (config.to_string(), map.to_string());
        let files = ChatFiles {
            tokenizer_config: Some(config.as_bytes()),
            special_tokens_map: Some(map.as_bytes()),
            chat_template: jinja.map(str::as_bytes),
        };
        ChatTemplate::from_files(&files)?.render(&[Message::new("user", "x")], &RenderOptions::default())
    };
    let show = "[{{ bos_token }}|{{ eos_token }}|{{ additional_special_tokens }}]";
    let tokens = json!({"bos_token": {"content": "<s>", "lstrip": false}, "eos_token": "</s>", "unk_token": null,
                        "chat_template": show, "model_max_length": 1e30});
    let map = json!({"bos_token": "other", "additional_special_tokens": ["<a>", {"content": "<b>"}]});
    assert_eq!(
        render(tokens.clone(), map.clone(), None).as_deref(),
        Ok("[<s>|</s>|['<a>', '<b>']]")
    );
    assert_eq!(
        render(tokens.clone(), json!({}), Some("{{ eos_token }}!\n")).as_deref(),
        Ok("</s>!")
    );
    assert_eq!(
        render(json!({"chat_template": show}), map, None).as_deref(),
        Ok("[other||['<a>', '<b>']]")
    );
    let named = json!([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]);
    assert_eq!(
        render(json!({"chat_template": named}), json!({}), None).as_deref(),
        Ok("d")
    );
    assert_eq!(
        render(json!({"chat_template": {"default": "d"}}), json!({}), None).as_deref(),
        Ok("d")
    );

    let error = render(json!({}), json!({}), None).expect_err("no template");
    assert_eq!(error, ChatError::NoTemplate);
    assert!(error.to_string().contains("--raw"));
    assert_eq!(
        ChatTemplate::from_files(&ChatFiles::default()).expect_err("no files"),
        ChatError::NoTemplate
    );
    for (config, says) in [
        (json!([]), "tokenizer_config.json"),
        (json!({"chat_template": 7}), "chat_template"),
        (
            json!({"chat_template": [{"name": "rag", "template": "r"}]}),
            "rag",
        ),
        (json!({"chat_template": "x", "eos_token": 7}), "eos_token"),
        (
            json!({"chat_template": "x", "eos_token": {"text": "</s>"}}),
            "eos_token",
        ),
        (json!({"chat_template": "{% for %}"}), "chat template"),
    ] {
        let error = render(config, json!({}), None).expect_err(says).to_string();
        assert!(error.contains(says), "{error}");
    }
    let cut = ChatFiles {
        tokenizer_config: Some(b"{\"chat_template\": \"x"),
        ..ChatFiles::default()
    };
    assert!(matches!(
        ChatTemplate::from_files(&cut),
        Err(ChatError::File {
            file: "tokenizer_config.json",
            ..
        })
    ));
    let latin = ChatFiles {
        chat_template: Some(b"\xe9"),
        ..ChatFiles::default()
    };
    assert!(matches!(
        ChatTemplate::from_files(&latin),
        Err(ChatError::File {
            file: "chat_template.jinja",
            ..
        })
    ));
}

#[test]
fn a_template_cannot_run_away() {
    let run = |source: &str| {
        let template = ChatTemplate::new(source, []).expect("compiles");
        template
            .render(&[Message::new("user", "x")], &RenderOptions::default())
            .expect_err(source)
    };
    for source in [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 100000000000 }}",
        "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='y' * 4000000) %}{{ ns.s }}{{ ns.s }}{{ ns.s }}{{ ns.s }}{{ ns.s }}",
    ] {
        let error = run(source);
        assert!(
            matches!(error, ChatError::Bound(_) | ChatError::Render(_)),
            "{source}: {error}"
        );
    }
    assert_eq!(
        run("{{ raise_exception('roles must alternate') }}"),
        ChatError::Refused("roles must alternate".to_owned())
    );
}
