//! etcd, by the JSON gateway of its version 3 (etcd 3.4 and later).
//!
//! A change is a transaction: it compares the revision in which the key was created, or the value,
//! and puts the new value or reads the one that is there. Reads are linearizable, which is etcd's
//! default. Of several nodes the one that answered last is asked first. What a node says of leaders
//! and quorums is tried again until the deadline, on the other nodes too; what it says of rights
//! and room is an error at once, and so is a certificate that is not trusted.
//!
//! Variables of `etcdctl` say who asks, and by which keys ([`Variables`]). A token says which
//! user asks. A node that has users asks for one: at first, when it has ended, and when users have
//! changed. Without TLS a password crosses the network in clear, as that of `etcdctl` does. Where a
//! certificate is not taken, the files are read once more: they may have been renewed.

use std::io;
use std::time::Duration;

use super::{
    Change, Exchanged, Lease, OutsideError, OutsideStore, Pulse, SEALED_BYTES_MAX, StorePath, path_to,
    retried,
};
use crate::Nanos;
use crate::auth::random_number;
use crate::clock::now;
use crate::rendezvous::world::Place;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use ureq::Agent;

const KIND: &str = "etcd";

/// How long a lease lasts after its last renewal, in seconds.
const LEASE_S: u64 = 5;

/// How often a lease is renewed.
const BEAT: Duration = Duration::from_secs(1);

/// How long one request to one node may take before another node is asked.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(2);

/// Longest answer, in bytes: a value in base64.
const ANSWER_BYTES_MAX: u64 = 2 * SEALED_BYTES_MAX as u64;

/// How many bytes of an answer that is none are shown.
const SHOWN_BYTES: usize = 48;

/// Codes of gRPC.
const NOT_FOUND: u64 = 5;
const PERMISSION_DENIED: u64 = 7;
const RESOURCE_EXHAUSTED: u64 = 8;
const UNAUTHENTICATED: u64 = 16;

/// How a node with users answers a certificate that would name one: its gateway asks in its stead.
const NAMED_CERTIFICATE: &[u8] = b"CommonName of client";

/// How a node asks who asks: there is no token, it has ended, or it is older than the users.
const TOKEN_WANTED: [&str; 3] = ["user name is empty", "invalid auth token", "revision of auth store is old"];

/// How a node says that a user or a password is wrong.
const NO_USER: &str = "invalid user ID or password";

/// See the module.
pub(super) struct EtcdStore {
    access: Access,
    /// Says who asks, where the store has users.
    token: Option<String>,
    places: Vec<Place>,
    /// The node that answered last.
    node: usize,
    prefix: String,
    address: String,
}

/// The variables that name files in PEM: the authorities that may have signed the store's
/// certificate, this process's certificate, and its key.
const FILES: [&str; 3] = ["ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"];

/// What the variables of `etcdctl` say.
#[derive(Clone, Default)]
struct Variables {
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "TLS alone reads files"))]
    files: [Option<String>; FILES.len()],
    /// `ETCDCTL_USER`: `NAME:PASSWORD`, or the name alone.
    user: Option<String>,
    /// `ETCDCTL_PASSWORD`
    password: Option<String>,
}

impl Variables {
    fn from_env() -> Self {
        let value = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name| value(name).map(|value| value.to_string_lossy().into_owned());
        Self { files: FILES.map(text), user: text("ETCDCTL_USER"), password: text("ETCDCTL_PASSWORD") }
    }

    /// Name and password, if this process is a user.
    fn user(&self) -> Option<(&str, &str)> {
        let user = self.user.as_deref()?;
        Some(match &self.password {
            Some(password) => (user, password),
            None => user.split_once(':').unwrap_or((user, "")),
        })
    }
}

/// How a store is asked, and by whom. Copies share the connections.
#[derive(Clone)]
struct Access {
    variables: Variables,
    agent: Agent,
    is_private: bool,
}

impl Access {
    /// As the variables say; with TLS or without. Reads the files that they name.
    fn new(is_private: bool, variables: Variables) -> Result<Self, OutsideError> {
        // Neither a proxy nor another address: what is named is asked.
        let config = Agent::config_builder().http_status_as_error(false).max_redirects(0).proxy(None);
        #[cfg(feature = "tls")]
        let config = if is_private {
            let file = |number: usize| (FILES[number], variables.files[number].as_deref());
            config.tls_config(super::etcd_tls::config([file(0), file(1), file(2)]).map_err(unusable)?)
        } else {
            config
        };
        #[cfg(not(feature = "tls"))]
        if is_private {
            return Err(OutsideError::NotBuilt { feature: "tls" });
        }
        Ok(Self { variables, agent: config.build().into(), is_private })
    }

    /// The first part of its address in rendezvous.
    fn scheme(&self) -> &'static str {
        if self.is_private { "etcds" } else { "etcd" }
    }

    /// The first part of its address in HTTP.
    fn protocol(&self) -> &'static str {
        if self.is_private { "https" } else { "http" }
    }

    /// What TLS has against the other end, or it against this one, if that stays so. What passes,
    /// such as an alert while the store gets other files, is nothing of this kind.
    #[cfg(feature = "tls")]
    fn fault(error: &ureq::Error) -> Option<String> {
        let error = match error {
            ureq::Error::Rustls(error) => error,
            ureq::Error::Io(error) => error.get_ref()?.downcast_ref::<rustls::Error>()?,
            ureq::Error::Tls(reason) => return Some((*reason).to_owned()),
            _ => return None,
        };
        super::etcd_tls::stays(error).then(|| error.to_string())
    }

    #[cfg(not(feature = "tls"))]
    fn fault(_: &ureq::Error) -> Option<String> {
        None
    }
}

fn unusable(problem: String) -> OutsideError {
    OutsideError::Access { problem }
}

impl EtcdStore {
    /// A store that is asked as the variables of `etcdctl` say, with TLS or without.
    pub(super) fn open(is_private: bool, places: Vec<Place>, prefix: &str) -> Result<Self, OutsideError> {
        Ok(Self::new(Access::new(is_private, Variables::from_env())?, places, prefix))
    }

    fn new(access: Access, places: Vec<Place>, prefix: &str) -> Self {
        let list: Vec<String> = places.iter().map(ToString::to_string).collect();
        let address = format!("{}://{}/{prefix}", access.scheme(), list.join(","));
        Self { access, token: None, places, node: 0, prefix: prefix.to_owned(), address }
    }

    fn key(&self, key: &str) -> String {
        STANDARD.encode(format!("{}/{key}", self.prefix))
    }

    /// A request to any node.
    fn request(&mut self, method: &str, body: &Value, deadline: Nanos) -> Result<Value, OutsideError> {
        let body = body.to_string();
        retried(deadline, || {
            let (mut passing, mut staying) = (None, None);
            for step in 0..self.places.len() {
                let node = (self.node + step) % self.places.len();
                match self.ask(node, method, &body, deadline) {
                    Ok(answer) => {
                        self.node = node;
                        return Ok(answer);
                    }
                    Err(error @ (OutsideError::Unreachable { .. } | OutsideError::NotReady { .. })) => {
                        passing = Some(error);
                    }
                    // Another node may have another certificate.
                    Err(error @ OutsideError::Access { .. }) => staying = Some(error),
                    Err(error) => return Err(error),
                }
                if now() >= deadline {
                    break;
                }
            }
            Err(passing.or(staying).expect("there is a node"))
        })
    }

    /// A request to one node. Says who asks if the node wants to know, and reads the files of TLS
    /// once more if they may have been renewed.
    fn ask(&mut self, node: usize, method: &str, body: &str, deadline: Nanos) -> Result<Value, OutsideError> {
        match self.post(node, method, body, deadline) {
            Err(error) if wants_token(&error) && self.access.variables.user.is_some() => {
                self.authenticate(node, deadline)?;
                self.post(node, method, body, deadline)
            }
            Err(error @ OutsideError::Access { .. }) => {
                let Ok(access) = Access::new(self.access.is_private, self.access.variables.clone()) else {
                    return Err(error);
                };
                self.access = access;
                self.post(node, method, body, deadline)
            }
            answer => answer,
        }
    }

    /// Asks for a token.
    fn authenticate(&mut self, node: usize, deadline: Nanos) -> Result<(), OutsideError> {
        self.token = None;
        let Some((name, password)) = self.access.variables.user() else { return Ok(()) };
        let body = json!({ "name": name, "password": password }).to_string();
        let answer = self.post(node, "auth/authenticate", &body, deadline)?;
        let token = answer.get("token").and_then(Value::as_str).ok_or_else(|| self.foreign())?;
        self.token = Some(token.to_owned());
        Ok(())
    }

    fn post(&self, node: usize, method: &str, body: &str, deadline: Nanos) -> Result<Value, OutsideError> {
        let place = &self.places[node];
        let address = || format!("{}://{place}/{}", self.access.scheme(), self.prefix);
        let left = deadline.since(now()).clamp(Duration::from_millis(1), ATTEMPT_LIMIT);
        let request = self.access.agent.post(format!("{}://{place}/v3/{method}", self.access.protocol()));
        let request = request.config().timeout_global(Some(left)).build();
        let unreachable = |error: ureq::Error| {
            if let Some(reason) = Access::fault(&error) {
                return unusable(format!("{} ({reason})", address()));
            }
            let source = match error {
                ureq::Error::Io(error) => error,
                ureq::Error::Timeout(_) => io::ErrorKind::TimedOut.into(),
                error => io::Error::other(error.to_string()),
            };
            OutsideError::Unreachable { address: address(), source }
        };
        let mut request = request.header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", token);
        }
        let mut response = request.send(body.as_bytes()).map_err(unreachable)?;
        let status = response.status().as_u16();
        let limited = response.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        let answer = limited.read_to_vec().map_err(unreachable)?;
        read_answer(status, &answer, &address)
    }
}

/// The answer of a node, or what it says against the request.
fn read_answer(status: u16, answer: &[u8], address: &dyn Fn() -> String) -> Result<Value, OutsideError> {
    let foreign = || OutsideError::Foreign {
        kind: KIND,
        address: address(),
        answer: answer[..answer.len().min(SHOWN_BYTES)].to_vec(),
    };
    if answer.starts_with(NAMED_CERTIFICATE) {
        let reason = "it has users, and takes no certificate with a CommonName over HTTP".to_owned();
        return Err(OutsideError::Refused { address: address(), reason });
    }
    let value: Value = serde_json::from_slice(answer).map_err(|_| foreign())?;
    if status == 200 {
        return if value.get("header").is_some() || value.get("result").is_some() {
            Ok(value)
        } else {
            Err(foreign())
        };
    }
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let reason = text("message").or_else(|| text("error")).ok_or_else(foreign)?;
    let (address, reason): (String, String) = (address(), reason.chars().take(200).collect());
    let code = value.get("code").and_then(Value::as_u64).unwrap_or(0);
    Err(match code {
        RESOURCE_EXHAUSTED => OutsideError::Full { address, reason },
        // A lease that has run out is not found.
        NOT_FOUND | PERMISSION_DENIED | UNAUTHENTICATED => OutsideError::Refused { address, reason },
        _ if status == 401 || status == 403 || reason.contains(NO_USER) || is_about_token(&reason) => {
            OutsideError::Refused { address, reason }
        }
        _ => OutsideError::NotReady { address, reason },
    })
}

fn is_about_token(reason: &str) -> bool {
    TOKEN_WANTED.iter().any(|text| reason.contains(text))
}

fn wants_token(error: &OutsideError) -> bool {
    matches!(error, OutsideError::Refused { reason, .. } if is_about_token(reason))
}

/// The first value among these, in base64.
fn first_value(values: Option<&Value>) -> Result<Option<Vec<u8>>, ()> {
    let Some(found) = values.and_then(|values| values.get(0)) else { return Ok(None) };
    let text = found.get("value").and_then(Value::as_str).unwrap_or_default();
    STANDARD.decode(text).map(Some).map_err(|_| ())
}

/// Whether a transaction was made, and else the value that is there.
fn read_change(answer: &Value) -> Result<Exchanged, ()> {
    if answer.get("succeeded").and_then(Value::as_bool) == Some(true) {
        return Ok(Exchanged::Written);
    }
    let response = answer.get("responses").and_then(|responses| responses.get(0)).ok_or(())?;
    let range = response.get("response_range").ok_or(())?;
    first_value(range.get("kvs")).map(Exchanged::Present)
}

/// The number of a lease, which is text in JSON.
fn number(answer: &Value, name: &str) -> Option<u64> {
    let number = answer.get(name)?;
    number.as_str().and_then(|text| text.parse().ok()).or_else(|| number.as_u64())
}

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    let address = || "etcd://a:1/b".to_owned();
    for status in [200, 400, 403, 503] {
        if let Ok(answer) = read_answer(status, bytes, &address) {
            let _ = read_change(&answer);
            let _ = first_value(answer.get("kvs"));
            let _ = number(&answer, "ID");
        }
    }
}

impl EtcdStore {
    fn foreign(&self) -> OutsideError {
        OutsideError::Foreign {
            kind: KIND,
            address: self.address.clone(),
            answer: b"JSON of another form".to_vec(),
        }
    }

    fn grant(&mut self, name: String, deadline: Nanos) -> Result<Lease, OutsideError> {
        let asked = json!({ "TTL": LEASE_S.to_string(), "ID": "0" });
        let answer = self.request("lease/grant", &asked, deadline)?;
        let number = number(&answer, "ID").ok_or_else(|| self.foreign())?;
        let lease = Lease { name, number };
        let value = random_number().to_le_bytes();
        let change = Change { expected: None, value: &value, lease: Some(&lease) };
        self.exchange(&lease.name, change, deadline)?;
        Ok(lease)
    }
}

impl OutsideStore for EtcdStore {
    fn address(&self) -> &str {
        &self.address
    }

    fn again(&self) -> Box<dyn OutsideStore> {
        let again = Self::new(self.access.clone(), self.places.clone(), &self.prefix);
        Box::new(Self { token: self.token.clone(), ..again })
    }

    fn exchange(
        &mut self,
        key: &str,
        change: Change<'_>,
        deadline: Nanos,
    ) -> Result<Exchanged, OutsideError> {
        let key = self.key(key);
        let compare = match change.expected {
            None => json!({ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }),
            Some(value) => {
                json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": STANDARD.encode(value) })
            }
        };
        let lease = change.lease.map_or(0, |lease| lease.number).to_string();
        let put = json!({ "key": key, "value": STANDARD.encode(change.value), "lease": lease });
        let body = json!({
            "compare": [compare],
            "success": [{ "request_put": put }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let answer = self.request("kv/txn", &body, deadline)?;
        let found = read_change(&answer).map_err(|()| self.foreign())?;
        // An attempt before this one may have written it, whose answer was lost.
        let is_own = matches!(&found, Exchanged::Present(Some(value)) if value == change.value);
        Ok(if is_own { Exchanged::Written } else { found })
    }

    fn read(&mut self, key: &str, deadline: Nanos) -> Result<Option<Vec<u8>>, OutsideError> {
        let answer = self.request("kv/range", &json!({ "key": self.key(key) }), deadline)?;
        first_value(answer.get("kvs")).map_err(|()| self.foreign())
    }

    fn lease(&mut self, name: &str, deadline: Nanos) -> Result<Lease, OutsideError> {
        self.grant(format!("lease-{name}"), deadline)
    }

    fn presence(&mut self, deadline: Nanos) -> Result<Lease, OutsideError> {
        self.grant(format!("member-{:016x}", random_number()), deadline)
    }

    fn beat(&self) -> Duration {
        BEAT
    }

    fn renew(&mut self, lease: &Lease, deadline: Nanos) -> Result<bool, OutsideError> {
        let answer = self.request("lease/keepalive", &json!({ "ID": lease.number.to_string() }), deadline)?;
        let answer = answer.get("result").unwrap_or(&answer);
        // Of one that has run out no time is left, and nothing is said.
        Ok(number(answer, "TTL").is_some_and(|left| left > 0))
    }

    fn revoke(&mut self, lease: &Lease, deadline: Nanos) {
        let _ = self.request("lease/revoke", &json!({ "ID": lease.number.to_string() }), deadline);
    }

    fn is_alive(
        &mut self,
        lease: &Lease,
        _pulse: &mut Pulse,
        deadline: Nanos,
    ) -> Result<Option<bool>, OutsideError> {
        self.read(&lease.name, deadline).map(|value| Some(value.is_some()))
    }

    fn is_inhabited(&mut self, deadline: Nanos) -> Result<bool, OutsideError> {
        // From "member-" to the first name after all that begin so.
        let range = json!({ "key": self.key("member-"), "range_end": self.key("member."), "limit": "1" });
        let answer = self.request("kv/range", &range, deadline)?;
        first_value(answer.get("kvs")).map(|value| value.is_some()).map_err(|()| self.foreign())
    }

    fn path(&self) -> Option<StorePath> {
        path_to(&self.places[self.node])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_node_says_against_a_request_is_told_apart() {
        let address = || "etcd://a:1/b".to_owned();
        let read = |status: u16, text: &str| read_answer(status, text.as_bytes(), &address);
        let full = r#"{"error":"etcdserver: mvcc: database space exceeded","code":8,"message":"etcdserver: mvcc: database space exceeded"}"#;
        assert!(matches!(read(429, full), Err(OutsideError::Full { .. })));
        let denied = r#"{"error":"etcdserver: permission denied","code":7}"#;
        assert!(matches!(read(403, denied), Err(OutsideError::Refused { .. })));
        let nobody = r#"{"error":"etcdserver: user name is empty","code":3}"#;
        assert!(matches!(read(400, nobody), Err(OutsideError::Refused { .. })));
        let headless = r#"{"error":"etcdserver: no leader","code":14}"#;
        assert!(matches!(read(503, headless), Err(OutsideError::NotReady { .. })));
        for (status, text) in [(404, "404 page not found"), (200, "<html>"), (200, "[1]"), (500, "{}")] {
            assert!(matches!(read(status, text), Err(OutsideError::Foreign { .. })), "{text}");
        }
    }

    #[test]
    fn a_change_is_made_or_says_which_value_is_there() {
        let read = |text: &str| read_change(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(read(r#"{"header":{},"succeeded":true,"responses":[{}]}"#), Ok(Exchanged::Written));
        let present = r#"{"responses":[{"response_range":{"kvs":[{"value":"Zm9v"}],"count":"1"}}]}"#;
        assert_eq!(read(present), Ok(Exchanged::Present(Some(b"foo".to_vec()))));
        assert_eq!(read(r#"{"responses":[{"response_range":{}}]}"#), Ok(Exchanged::Present(None)));
        assert_eq!(read(r#"{"header":{}}"#), Err(()));
    }

    #[test]
    fn a_user_has_a_password_of_its_own_or_behind_its_name() {
        let user = |user: Option<&str>, password: Option<&str>| {
            let own = |text: Option<&str>| text.map(str::to_owned);
            let variables = Variables { user: own(user), password: own(password), ..Variables::default() };
            variables.user().map(|(name, password)| (name.to_owned(), password.to_owned()))
        };
        let pair = |name: &str, password: &str| Some((name.to_owned(), password.to_owned()));
        assert_eq!(user(None, None), None);
        assert_eq!(user(Some("ann:se:cret"), None), pair("ann", "se:cret"));
        assert_eq!(user(Some("ann"), Some("secret")), pair("ann", "secret"));
        assert_eq!(user(None, Some("secret")), None);
    }

    /// Where an etcd of tests is, and what it is told of certificates.
    #[cfg(feature = "tls")]
    fn private_etcd(of: &str, asks_for_certificates: bool) -> Option<crate::outside_stores::Etcd> {
        let (own, key) = (file(&format!("{of}.pem")), file(&format!("{of}.key")));
        let authority = file("store-authority.pem");
        let mut options = vec!["--cert-file", &own, "--key-file", &key];
        if asks_for_certificates {
            options.extend(["--client-cert-auth", "--trusted-ca-file", &authority]);
        }
        crate::outside_stores::Etcd::start(1, crate::ports::reserve(2), &options)
    }

    #[cfg(feature = "tls")]
    fn file(name: &str) -> String {
        format!("{}/tests/certificates/{name}", env!("CARGO_MANIFEST_DIR"))
    }

    #[cfg(feature = "tls")]
    fn variables(authority: &str, own: Option<(&str, &str)>, user: Option<&str>) -> Variables {
        let files = [Some(authority), own.map(|(certificate, _)| certificate), own.map(|(_, key)| key)];
        let files = files.map(|file| file.map(str::to_owned));
        Variables { files, user: user.map(str::to_owned), password: None }
    }

    #[cfg(feature = "tls")]
    fn store_with(etcd: &crate::outside_stores::Etcd, variables: Variables) -> EtcdStore {
        let place = Place { host: "127.0.0.1".to_owned(), port: etcd.port(0) };
        let access = Access::new(true, variables).expect("the files are there");
        EtcdStore::new(access, vec![place], "of-a-test")
    }

    #[cfg(feature = "tls")]
    fn late() -> Nanos {
        now() + Duration::from_secs(60)
    }

    #[cfg(feature = "tls")]
    fn has_users(store: &mut EtcdStore) {
        for (method, body) in [
            ("auth/user/add", json!({ "name": "root", "password": "of-a-test" })),
            ("auth/role/add", json!({ "name": "root" })),
            ("auth/user/grant", json!({ "user": "root", "role": "root" })),
            ("auth/enable", json!({})),
        ] {
            store.request(method, &body, late()).expect("anybody may do anything still");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn an_etcd_with_tls_and_this_process_look_at_each_others_certificates() {
        let Some(etcd) = private_etcd("store", true) else {
            return crate::skipped::skip("etcd is not installed (Debian's package etcd-server)");
        };
        let (authority, own, key) = (file("store-authority.pem"), file("store.pem"), file("store.key"));
        let mut store = store_with(&etcd, variables(&authority, Some((&own, &key)), None));
        let put = Change { expected: None, value: b"a", lease: None };
        assert_eq!(store.exchange("key", put, late()).expect("is asked"), Exchanged::Written);
        assert!(store.address().starts_with("etcds://127.0.0.1:"), "{}", store.address());

        // Another authority, and no certificate of its own: at once, and by name. Which name of the
        // second one depends on the version of the store.
        let began = now();
        let foreign = store_with(&etcd, variables(&file("other-authority.pem"), None, None));
        let nobody = store_with(&etcd, variables(&authority, None, None));
        for (mut store, reason) in [(foreign, "UnknownIssuer"), (nobody, "Certificate")] {
            let error = store.read("key", late()).expect_err("one does not trust the other");
            let text = error.to_string();
            assert!(matches!(error, OutsideError::Access { .. }), "{text}");
            assert!(text.contains(reason) && text.contains("ETCDCTL_CACERT"), "{text}");
        }
        assert!(now().since(began) < Duration::from_secs(10), "nobody waits for the deadline");
        has_users(&mut store);
        let error = store.read("key", late()).expect_err("the certificate has a name");
        assert!(error.to_string().contains("takes no certificate with a CommonName"), "{error}");
    }

    #[cfg(feature = "tls")]
    #[test]
    fn certificates_that_are_renewed_are_read_again_and_a_node_with_another_one_harms_nobody() {
        let (Some(etcd), Some(other)) = (private_etcd("store", true), private_etcd("rank", false)) else {
            return crate::skipped::skip("etcd is not installed (Debian's package etcd-server)");
        };
        let folder = std::env::temp_dir().join(format!("pleach-etcd-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let own = |name: &str| folder.join(name).to_str().expect("is UTF-8").to_owned();
        let (certificate, key) = (own("own.pem"), own("own.key"));
        let copy = |from: &str, to: &str| {
            std::fs::copy(file(from), to).expect("can be written");
        };
        copy("foreign.pem", &certificate);
        copy("foreign.key", &key);
        let authority = file("store-authority.pem");
        let mut store = store_with(&etcd, variables(&authority, Some((&certificate, &key)), None));
        let error = store.read("key", late()).expect_err("it is another authority's");
        assert!(matches!(error, OutsideError::Access { .. }), "{error}");
        copy("store.pem", &certificate);
        copy("store.key", &key);
        assert_eq!(store.read("key", late()).expect("it is renewed"), None);
        std::fs::remove_dir_all(&folder).expect("it is there");

        // The first node's certificate is another authority's.
        let [first, second] =
            [other.port(0), etcd.port(0)].map(|port| Place { host: "127.0.0.1".to_owned(), port });
        let own = (file("store.pem"), file("store.key"));
        let access = Access::new(true, variables(&authority, Some((&own.0, &own.1)), None));
        let access = access.expect("the files are there");
        let mut alone = EtcdStore::new(access.clone(), vec![first.clone()], "of-a-test");
        let error = alone.read("key", late()).expect_err("it is not trusted");
        assert!(matches!(error, OutsideError::Access { .. }), "{error}");
        let mut both = EtcdStore::new(access, vec![first, second], "of-a-test");
        assert_eq!(both.read("key", late()).expect("the second node answers"), None);
    }

    #[cfg(feature = "tls")]
    #[test]
    fn an_etcd_with_users_is_asked_with_a_password() {
        let Some(etcd) = private_etcd("store", false) else {
            return crate::skipped::skip("etcd is not installed (Debian's package etcd-server)");
        };
        let authority = file("store-authority.pem");
        let with = |user: Option<&str>| store_with(&etcd, variables(&authority, None, user));
        let mut store = with(None);
        let put = Change { expected: None, value: b"a", lease: None };
        store.exchange("key", put, late()).expect("it has no users");
        // A user where there are none is not asked who it is.
        let found = with(Some("root:of-a-test")).read("key", late());
        assert_eq!(found.expect("it has no users"), Some(b"a".to_vec()));
        has_users(&mut store);
        for mut denied in [store, with(Some("root:of-another-test")), with(Some("nobody:at-all"))] {
            let error = denied.read("key", late()).expect_err("it is no user");
            assert!(matches!(error, OutsideError::Refused { .. }), "{error}");
        }
        let mut store = with(Some("root:of-a-test"));
        assert_eq!(store.read("key", late()).expect("is a user"), Some(b"a".to_vec()));
        // As after the token's end.
        store.token = Some("old".to_owned());
        assert_eq!(store.read("key", late()).expect("says again who it is"), Some(b"a".to_vec()));
        assert_ne!(store.token.as_deref(), Some("old"));
    }

    #[test]
    fn a_token_is_asked_for_where_it_is_missing_has_ended_or_is_older_than_the_users() {
        let address = || "etcd://a:1/b".to_owned();
        let read = |text: &str| read_answer(400, text.as_bytes(), &address).expect_err("it is refused");
        for text in ["user name is empty", "invalid auth token", "revision of auth store is old"] {
            let text = format!(r#"{{"error":"etcdserver: {text}","code":3}}"#);
            assert!(wants_token(&read(&text)), "{text}");
        }
        let wrong =
            read(r#"{"error":"etcdserver: authentication failed, invalid user ID or password","code":3}"#);
        assert!(matches!(wrong, OutsideError::Refused { .. }) && !wants_token(&wrong), "{wrong}");
        for (code, text) in [(9, "etcdserver: rpc not supported for learner"), (14, "dial etcd.users.svc")] {
            let text = format!(r#"{{"error":"{text}","code":{code}}}"#);
            assert!(matches!(read(&text), OutsideError::NotReady { .. }), "{text}");
        }
    }
}
