//! The rules. Each takes the tree, or a file of it, and gives what breaks it; none knows where the tree lies.

use std::collections::BTreeSet;

use crate::source::{SourceFile, functions, is_word, line_of, words};

/// A breach: file, line (0: the file as a whole), what and why.
pub type Findings = Vec<String>;

/// Most lines of a source file.
pub const FILE_LINES: usize = 600;
/// Most lines of a function.
pub const FUNCTION_LINES: usize = 80;
/// Most bytes of the tracked tree.
pub const TREE_BYTES: u64 = 35 << 20;

/// Who may depend on whom: a folder, and the folders it may name. A leaf is named by nobody.
pub const ARROWS: &[(&str, &[&str])] = &[
    ("core", &[]),
    ("cache", &["core"]),
    ("models", &["core"]),
    ("kernels-cuda", &["core"]),
    ("kernels-wgsl", &["core"]),
    ("evidence", &["core"]),
    (
        "runtime",
        &["core", "cache", "models", "kernels-cuda", "kernels-wgsl"],
    ),
    (
        "server",
        &[
            "core",
            "cache",
            "models",
            "kernels-cuda",
            "kernels-wgsl",
            "runtime",
        ],
    ),
    (
        "cli",
        &[
            "core",
            "cache",
            "models",
            "kernels-cuda",
            "kernels-wgsl",
            "runtime",
            "server",
            "evidence",
        ],
    ),
    (
        "benches",
        &[
            "core",
            "cache",
            "models",
            "kernels-cuda",
            "kernels-wgsl",
            "runtime",
        ],
    ),
    ("fuzz", &["core", "cache", "models", "runtime", "server"]),
];

/// The one folder where a dependency may be named.
pub const HOMES: &[(&str, &str)] = &[
    ("cudarc", "kernels-cuda"),
    ("wgpu", "kernels-wgsl"),
    ("naga", "kernels-wgsl"),
    ("tokenizers", "models"),
    ("minijinja", "models"),
    ("hf-hub", "models"),
    ("axum", "server"),
    ("hyper", "server"),
    ("tokio", "server"),
    ("clap", "cli"),
    ("clap_complete", "cli"),
    ("clap_mangen", "cli"),
    ("criterion", "benches"),
];

/// Files that may read the environment; a build script is told its folders that way.
pub const ENVIRONMENT: &[&str] = &["cli/src/args.rs", "kernels-cuda/build.rs"];

/// Dependencies point the allowed way, and each outside dependency has one home. Takes a `Cargo.toml`.
pub fn arrows(file: &SourceFile) -> Findings {
    let Some(folder) = file.path.strip_suffix("/Cargo.toml") else {
        return Vec::new();
    };
    let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == folder) else {
        return vec![format!(
            "{}: a crate with no place in the dependency order",
            file.path
        )];
    };
    let text = file.text.as_deref().unwrap_or_default();
    let mut findings = Vec::new();
    if !text.contains("[lints]\nworkspace = true") {
        findings.push(format!("{}: does not take the lints of the workspace", file.path));
    }
    for name in dependencies(text) {
        match name.strip_prefix("horizon-") {
            // A crate may switch on its own features for its tests.
            Some(target) if target != folder && !allowed.contains(&target) => {
                findings.push(format!("{}: {folder} must not depend on {target}", file.path));
            }
            Some(_) => {}
            None => findings.extend(
                HOMES
                    .iter()
                    .filter(|(dependency, home)| *dependency == name && *home != folder)
                    .map(|(dependency, home)| format!("{}: {dependency} belongs to {home} alone", file.path)),
            ),
        }
    }
    findings
}

/// Names in every dependency table of a `Cargo.toml`, renamed packages by their own name.
fn dependencies(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(table) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            inside = table.ends_with("dependencies");
            if let Some((_, name)) = table.split_once("dependencies.") {
                names.insert(name.trim_matches('"').to_owned());
            }
        } else if inside {
            let key = line
                .split(['=', '.', ' '])
                .next()
                .unwrap_or_default()
                .trim_matches('"');
            let package = line
                .split_once("package = \"")
                .and_then(|(_, r)| r.split('"').next());
            if !key.is_empty() && !key.starts_with('#') {
                names.insert(package.unwrap_or(key).to_owned());
            }
        }
    }
    names
}

/// No source file and no function is longer than its limit; a function of a test may be a long list of cases.
pub fn lengths(file: &SourceFile) -> Findings {
    let source = ["rs", "cu", "cuh", "wgsl", "sh", "py"]
        .iter()
        .any(|e| file.has_extension(e));
    let Some(text) = file.text.as_deref().filter(|_| source) else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES {
        findings.push(format!("{}: {lines} lines, more than {FILE_LINES}", file.path));
    }
    let product = file.rust().filter(|_| !in_tests(file));
    for (name, first, last) in product.map(|t| functions(&t)).unwrap_or_default() {
        let lines = last - first + 1;
        if lines > FUNCTION_LINES {
            let path = &file.path;
            findings.push(format!(
                "{path}:{first}: fn {name} has {lines} lines, more than {FUNCTION_LINES}"
            ));
        }
    }
    findings
}

/// The environment is read in the listed files only. Tests may, to tell a process that they start what to do.
pub fn environment(file: &SourceFile) -> Findings {
    let Some(text) = file
        .rust()
        .filter(|_| !ENVIRONMENT.contains(&&*file.path) && !in_tests(file))
    else {
        return Vec::new();
    };
    ["env::var", "env::{", "env::*", "option_env!"]
        .iter()
        .flat_map(|call| text.match_indices(call))
        .map(|(at, call)| {
            format!(
                "{}:{}: {call} outside {ENVIRONMENT:?}",
                file.path,
                line_of(&text, at)
            )
        })
        .collect()
}

fn in_tests(file: &SourceFile) -> bool {
    file.path.split('/').any(|folder| folder == "tests")
}

/// Nothing unfinished and nothing switched off is left in the tree.
pub fn markers(file: &SourceFile) -> Findings {
    // Put together here so that this file does not hold them.
    let code = [
        concat!("to", "do!"),
        concat!("unimple", "mented!"),
        concat!("db", "g!"),
        concat!("#[ig", "nore"),
    ];
    let anywhere = [concat!("FIX", "ME"), concat!("XX", "X:"), concat!("TO", "DO")];
    let Some(text) = file.text.as_deref() else {
        return Vec::new();
    };
    let rust = file.rust().unwrap_or_default();
    let hit = |text: &str, at| format!("{}:{}", file.path, line_of(text, at));
    let code = code.iter().flat_map(|m| rust.match_indices(m));
    let code = code.filter(|(at, _)| !rust[..*at].chars().next_back().is_some_and(is_word));
    let mut findings: Findings = code
        .map(|(at, m)| format!("{}: {m} left behind", hit(&rust, at)))
        .collect();
    for marker in anywhere {
        let end = marker.trim_end_matches(':');
        findings.extend(
            words(text, end)
                .filter(|at| text[*at..].starts_with(marker))
                .map(|at| format!("{}: {marker} left behind", hit(text, at))),
        );
    }
    findings
}

/// No path of one machine is in the tree.
pub fn machine_paths(file: &SourceFile) -> Findings {
    let paths = [
        concat!("/wo", "rk/"),
        concat!("/ho", "me/"),
        concat!("/ro", "ot/"),
        concat!("/Use", "rs/"),
        concat!("C:\\Use", "rs"),
        concat!("../sha", "red"),
    ];
    let Some(text) = file.text.as_deref() else {
        return Vec::new();
    };
    paths
        .iter()
        .flat_map(|p| text.match_indices(p))
        .filter(|(at, p)| !p.starts_with('/') || !text[..*at].chars().next_back().is_some_and(is_word))
        .map(|(at, p)| format!("{}:{}: a path of one machine, {p}", file.path, line_of(text, at)))
        .collect()
}

/// `unsafe` stands only in the files of `allowed`, each of which needs it and says why.
pub fn unsafe_code(tree: &[SourceFile], allowed: &[&str]) -> Findings {
    let mut findings = Vec::new();
    for file in tree {
        let Some(text) = file.rust() else { continue };
        let first = words(&text, "unsafe").next();
        let listed = allowed.contains(&&*file.path);
        match first {
            Some(at) if !listed => findings.push(format!(
                "{}:{}: unsafe outside the files listed in the tidy test",
                file.path,
                line_of(&text, at)
            )),
            None if listed => findings.push(format!("{}: listed for unsafe, but has none", file.path)),
            _ => {}
        }
    }
    for path in allowed {
        if !tree.iter().any(|f| f.path == *path) {
            findings.push(format!("{path}: listed for unsafe, but does not exist"));
        }
    }
    findings
}

/// The tree stays small enough to clone.
pub fn tree_size(tree: &[SourceFile]) -> Findings {
    let bytes: u64 = tree.iter().map(|f| f.bytes).sum();
    if bytes < TREE_BYTES {
        return Vec::new();
    }
    let mut largest: Vec<&SourceFile> = tree.iter().collect();
    largest.sort_by_key(|f| std::cmp::Reverse(f.bytes));
    let names: Vec<String> = largest
        .iter()
        .take(5)
        .map(|f| format!("{} ({})", f.path, f.bytes))
        .collect();
    vec![format!(
        "the tree has {bytes} bytes, more than {TREE_BYTES}; largest: {}",
        names.join(", ")
    )]
}

/// Every Rust file is compiled: a crate root, or reached from one by `mod`.
pub fn dead_files(tree: &[SourceFile]) -> Findings {
    let rust: Vec<(&SourceFile, String)> = tree.iter().filter_map(|f| f.rust().map(|t| (f, t))).collect();
    let mut reached: BTreeSet<String> = rust
        .iter()
        .map(|(f, _)| f.path.clone())
        .filter(|p| is_root(p))
        .collect();
    let mut queue: Vec<String> = reached.iter().cloned().collect();
    while let Some(path) = queue.pop() {
        let Some((file, text)) = rust.iter().find(|(f, _)| f.path == path) else {
            continue;
        };
        for candidate in modules(file, text) {
            if rust.iter().any(|(f, _)| f.path == candidate) && reached.insert(candidate.clone()) {
                queue.push(candidate);
            }
        }
    }
    rust.iter()
        .filter(|(f, _)| !reached.contains(&f.path))
        .map(|(f, _)| format!("{}: no mod declaration reaches this file", f.path))
        .collect()
}

fn is_root(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    let target = ["tests", "benches", "examples", "bin", "fuzz_targets"];
    match parts[..] {
        [.., "src", "lib.rs" | "main.rs"] | [_, "build.rs"] => true,
        [.., folder, _, "main.rs"] if target.contains(&folder) => true,
        // A crate's own folder may have one of these names; its targets then lie one level below.
        [.., folder, _] => target.contains(&folder) && parts.len() > 2,
        _ => false,
    }
}

/// Paths that the `mod name;` declarations of a file may mean.
fn modules(file: &SourceFile, text: &str) -> Vec<String> {
    let original = file.text.as_deref().unwrap_or_default();
    let (folder, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
    let own = if is_root(&file.path) || name == "mod.rs" {
        folder.to_owned()
    } else {
        format!("{folder}/{}", name.trim_end_matches(".rs"))
    };
    let mut paths = Vec::new();
    for at in words(text, "mod") {
        let rest = text[at + 3..].trim_start();
        let module: String = rest.chars().take_while(|c| is_word(*c)).collect();
        if module.is_empty() || !rest[module.len()..].trim_start().starts_with(';') {
            continue;
        }
        let before = line_of(text, at).saturating_sub(2);
        match original
            .lines()
            .nth(before)
            .and_then(|l| l.trim().strip_prefix("#[path = \""))
        {
            Some(path) => paths.push(joined(folder, path.trim_end_matches("\"]"))),
            None => paths.extend([format!("{own}/{module}.rs"), format!("{own}/{module}/mod.rs")]),
        }
    }
    paths
}

/// A path relative to a folder, without `..`.
fn joined(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in path.split('/') {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts.join("/")
}
