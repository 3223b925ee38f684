//! Where a checkpoint keeps its chat template and its special tokens.

use serde_json::{Map, Value};

use super::ChatError;

/// The contents of the files that say how a model chats; `None` for those that the checkpoint lacks.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatFiles<'a> {
    /// `chat_template.jinja`: the template alone. Wins over the one in `tokenizer_config.json`.
    pub chat_template: Option<&'a [u8]>,
    /// `tokenizer_config.json`: `chat_template` (a text, or a list of named ones), and the special tokens.
    pub tokenizer_config: Option<&'a [u8]>,
    /// `special_tokens_map.json`: special tokens that `tokenizer_config.json` does not mention.
    pub special_tokens_map: Option<&'a [u8]>,
}

/// What the files say.
pub(super) struct Found {
    pub template: Option<String>,
    pub special_tokens: Vec<(String, Value)>,
}

const CONFIG: &str = "tokenizer_config.json";
const MAP: &str = "special_tokens_map.json";
const JINJA: &str = "chat_template.jinja";

/// The special tokens that are texts.
const TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// The special tokens that are a list of texts.
const MORE_TOKENS: &str = "additional_special_tokens";

impl ChatFiles<'_> {
    /// A special token's text, `eos_token` say.
    ///
    /// # Errors
    /// When one of the files is not what it should be.
    pub fn special_token(&self, name: &str) -> Result<Option<String>, ChatError> {
        let tokens = self.read()?.special_tokens;
        let token = tokens.into_iter().find(|(n, _)| n == name);
        Ok(token.and_then(|(_, value)| value.as_str().map(str::to_owned)))
    }

    pub(super) fn read(&self) -> Result<Found, ChatError> {
        let config = self
            .tokenizer_config
            .map(|b| object(CONFIG, b))
            .transpose()?
            .unwrap_or_default();
        let map = self
            .special_tokens_map
            .map(|b| object(MAP, b))
            .transpose()?
            .unwrap_or_default();
        let template = match self.chat_template {
            Some(bytes) => Some(std::str::from_utf8(bytes).map_err(|e| file(JINJA, e))?.to_owned()),
            None => template_of(&config)?,
        };
        let mut special_tokens = Vec::new();
        for name in TOKENS.into_iter().chain([MORE_TOKENS]) {
            let (from, value) = match config.get(name) {
                Some(value) => (CONFIG, value),
                None => (MAP, map.get(name).unwrap_or(&Value::Null)),
            };
            let value = match value {
                Value::Null => continue,
                Value::Array(list) if name == MORE_TOKENS => {
                    let texts: Option<Vec<Value>> = list.iter().map(text).collect();
                    texts.map(Value::Array)
                }
                one => text(one).filter(|_| name != MORE_TOKENS),
            };
            let value = value.ok_or_else(|| file(from, format!("{name} is not a token's text")))?;
            special_tokens.push((name.to_owned(), value));
        }
        Ok(Found {
            template,
            special_tokens,
        })
    }
}

/// A token is its text, or an object with the text as `content`.
fn text(token: &Value) -> Option<Value> {
    let content = if token.is_object() {
        token.get("content")?
    } else {
        token
    };
    content.is_string().then(|| content.clone())
}

/// `chat_template`: a text; a list of `name` and `template`; or an object from names to templates.
fn template_of(config: &Map<String, Value>) -> Result<Option<String>, ChatError> {
    let named: Vec<(&str, &str)> = match config.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(template)) => return Ok(Some(template.clone())),
        Some(Value::Array(list)) => {
            let named = list
                .iter()
                .map(|t| Some((t.get("name")?.as_str()?, t.get("template")?.as_str()?)));
            named.collect::<Option<_>>()
        }
        Some(Value::Object(by_name)) => by_name
            .iter()
            .map(|(n, t)| Some((n.as_str(), t.as_str()?)))
            .collect(),
        Some(_) => None,
    }
    .ok_or_else(|| {
        file(
            CONFIG,
            "chat_template is neither a text nor a list of named texts",
        )
    })?;
    match named.iter().find(|(name, _)| *name == "default") {
        Some((_, template)) => Ok(Some((*template).to_owned())),
        None if named.is_empty() => Ok(None),
        None => {
            let names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
            let names = names.join(", ");
            Err(file(
                CONFIG,
                format!("chat_template has no template named \"default\", only {names}"),
            ))
        }
    }
}

fn object(name: &'static str, bytes: &[u8]) -> Result<Map<String, Value>, ChatError> {
    serde_json::from_slice(bytes).map_err(|e| file(name, format!("not a JSON object: {e}")))
}

fn file(file: &'static str, problem: impl ToString) -> ChatError {
    ChatError::File {
        file,
        problem: problem.to_string(),
    }
}
