use proptest::prelude::*;

use super::*;

/// A file with this text. It is deleted when dropped.
struct Written(PathBuf);

impl Written {
    fn new(name: &str, text: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("pleach-source-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }

    fn origin(&self) -> Origin {
        source_with(&self.0.display().to_string(), &SourceOptions::default()).unwrap().1
    }

    fn error(&self) -> String {
        let error = load(&self.0).unwrap_err().to_string();
        error.strip_prefix(&self.0.display().to_string()).unwrap_or_else(|| panic!("{error}")).to_owned()
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn the_forms_of_files_are_told_apart_by_what_is_in_them() {
    let toml = Written::new("a.xml", preset("ring:3").to_toml());
    assert_eq!(toml.origin(), Origin::Toml);
    let xml = Written::new("b.toml", include_str!("../nccl/tests/direct.xml"));
    assert_eq!(xml.origin(), Origin::NcclXml);
    let smi = Written::new("c", "# nvidia-smi topo -m\n\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV2\t X \n");
    assert_eq!(smi.origin(), Origin::SmiMatrix { nvlink_bytes_per_s: smi::NVLINK_BYTES_PER_S });
    let options = SourceOptions { nvlink_bytes_per_s: 7 };
    let (topology, _) = source_with(&smi.0.display().to_string(), &options).unwrap();
    assert_eq!(topology.links()[0].bytes_per_s, 14);
}

fn preset(name: &str) -> Topology {
    presets::preset(name).unwrap()
}

#[test]
fn presets_are_asked_for_by_name() {
    let (topology, origin) = source_with("dgx-a100:2", &SourceOptions::default()).unwrap();
    assert_eq!((topology, origin), (preset("dgx-a100:2"), Origin::Preset));
    let wrong = source("ring:x").unwrap_err();
    assert!(matches!(wrong, TopologySourceError::Preset(PresetError::Form { .. })), "{wrong}");
}

#[test]
fn what_is_neither_preset_nor_file_is_told_of_both() {
    let error = source("dgx-9").unwrap_err().to_string();
    assert!(
        error.starts_with("'dgx-9' is neither a file nor a preset; presets are dgx-1p, dgx-1v, ndv2,"),
        "{error}"
    );
    assert!(error.ends_with("star:N[@GB/s], and machine for this one"), "{error}");
}

#[test]
fn a_file_that_is_no_topology_says_so_in_one_line_with_its_place() {
    assert_eq!(
        Written::new("d", "hello\n").error(),
        ":1:1: no topology: neither a TOML file with [[node]] and [[link]], nor an NCCL topology XML file, nor the text of nvidia-smi topo -m"
    );
    assert!(Written::new("e", "[[node]]\nname = 3\n").error().starts_with(":2:8: "));
    assert!(
        Written::new("f", "\n<html/>")
            .error()
            .starts_with(":2:1: no NCCL topology: its outermost element is <html>")
    );
    assert_eq!(
        Written::new("g", b"[[node]]\nname = \"\xff\"\n").error(),
        ":2:9: no text: a topology file is UTF-8"
    );
    assert!(Written::new("h", "").error().starts_with(":1:1: "));
    assert!(matches!(load(std::env::temp_dir()), Err(TopologySourceError::Read { .. })));
}

#[test]
fn a_file_without_end_is_not_read_to_its_end() {
    let endless = load("/dev/zero").unwrap_err();
    assert!(matches!(endless, TopologySourceError::TooLong { .. }), "{endless}");
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,60}") {
        let _ = parse(&text, &SourceOptions::default());
    }
}
