//! Writes a recipe as safetensors files, on all threads of the current pool, without holding a file in memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::recipe::{Recipe, TensorRule};
use super::{Summary, SyntheticError};
use crate::artifact::Progress;
use crate::artifact::writer::WriteError;

/// Bytes that one thread makes and writes at a time.
const CHUNK: usize = 4 << 20;

/// The weights of `recipe` as files in `dir`, which exists: one safetensors file for each file that the recipe
/// names, and `model.safetensors.index.json` when there are several.
///
/// The data of a file stands in the order of the tensor names, the header is padded with blanks to a multiple
/// of 8 bytes. The same recipe gives the same bytes for any number of threads.
///
/// # Errors
/// [`SyntheticError::Write`] with the file.
pub fn write_recipe(dir: &Path, recipe: &Recipe, progress: &dyn Progress) -> Result<Summary, SyntheticError> {
    let mut files: BTreeMap<&str, Vec<&TensorRule>> = BTreeMap::new();
    for rule in &recipe.tensors {
        files.entry(&rule.file).or_default().push(rule);
    }
    let data: u64 = recipe.tensors.iter().map(|t| t.bytes() as u64).sum();
    progress.begin("writing weights", data);
    let mut written = data;
    for (file, rules) in &mut files {
        rules.sort_by(|a, b| a.name.cmp(&b.name));
        let path = dir.join(file);
        written += write_file(&path, recipe.seed, rules, progress).map_err(|e| WriteError::io(&path)(e))?;
    }
    if files.len() > 1 {
        let path = dir.join("model.safetensors.index.json");
        let text = index(recipe, data);
        written += text.len() as u64;
        std::fs::write(&path, text).map_err(|e| WriteError::io(&path)(e))?;
    }
    Ok(Summary {
        tensors: recipe.tensors.len(),
        files: files.len(),
        data_bytes: data,
        file_bytes: written,
    })
}

/// Writes one file and gives the length of its header.
fn write_file(path: &Path, seed: u64, rules: &[&TensorRule], progress: &dyn Progress) -> io::Result<u64> {
    let header = header(rules);
    File::create(path)?.write_all(&header)?;
    let mut jobs = Vec::new();
    let mut at = header.len() as u64;
    for rule in rules {
        for start in (0..rule.bytes()).step_by(CHUNK) {
            let len = CHUNK.min(rule.bytes() - start);
            jobs.push((*rule, start, len, at));
            at += len as u64;
        }
    }
    // Threads take the next job in file order, so the file grows from its start on a disk that dislikes seeking.
    let next = AtomicUsize::new(0);
    (0..rayon::current_num_threads())
        .into_par_iter()
        .with_max_len(1)
        .try_for_each(|_| {
            let mut file = File::options().write(true).open(path)?;
            let mut buffer = vec![0; CHUNK];
            while let Some((rule, start, len, at)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let out = &mut buffer[..*len];
                rule.fill(seed, start / 2, out);
                file.seek(SeekFrom::Start(*at))?;
                file.write_all(out)?;
                progress.advance(*len as u64);
            }
            Ok::<_, io::Error>(())
        })?;
    Ok(header.len() as u64)
}

fn header(rules: &[&TensorRule]) -> Vec<u8> {
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for rule in rules {
        let end = at + rule.bytes();
        map.insert(
            rule.name.clone(),
            json!({"dtype": "BF16", "shape": rule.shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.append(&mut text);
    out
}

fn index(recipe: &Recipe, data: u64) -> String {
    let names: BTreeMap<&str, &str> = recipe.tensors.iter().map(|t| (&*t.name, &*t.file)).collect();
    let value = json!({"metadata": {"total_size": data}, "weight_map": names});
    format!("{value:#}\n")
}
