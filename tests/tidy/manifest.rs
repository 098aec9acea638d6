//! The crates of the workspace and what they depend on.

use crate::read;

/// A crate of the workspace.
pub(crate) struct Manifest {
    /// Its name.
    pub(crate) package: String,
    /// Of every kind: for the build, for tests, for a target.
    pub(crate) dependencies: Vec<String>,
    /// Its manifest.
    pub(crate) text: String,
}

pub(crate) fn manifests() -> Vec<Manifest> {
    let workspace = read("Cargo.toml");
    let members =
        workspace.lines().find_map(|line| line.strip_prefix("members = ")).expect("a list of members");
    let members: Vec<&str> = words_in_quotes(members);
    assert!(members.len() > 1, "the workspace has members");
    let names = members.iter().map(|member| format!("{member}/Cargo.toml"));
    // Workspaces of their own, and the root.
    let own = ["Cargo.toml", "graph-analyzer/onnx/Cargo.toml", "exchange/proto/Cargo.toml"];
    names.chain(own.map(str::to_owned)).map(|name| manifest(read(&name))).collect()
}

fn words_in_quotes(line: &str) -> Vec<&str> {
    line.split('"').skip(1).step_by(2).collect()
}

fn manifest(text: String) -> Manifest {
    let (mut table, mut package, mut dependencies) = (String::new(), String::new(), Vec::new());
    for line in text.lines() {
        if let Some(header) = line.strip_prefix('[') {
            table = header.trim_end_matches(']').to_owned();
            continue;
        }
        let key = line.split(['=', '.', ' ']).next().unwrap_or_default();
        if table == "package" && key == "name" {
            package = words_in_quotes(line).concat();
        }
        let of_a_kind = table.ends_with("dependencies") && !table.starts_with("workspace");
        if of_a_kind && !key.is_empty() && !key.starts_with('#') {
            dependencies.push(key.to_owned());
        }
    }
    Manifest { package, dependencies, text }
}
