BEGIN TRANSACTION;
CREATE TABLE skyward_accounts (
	name VARCHAR(255) NOT NULL, 
	limit_micro_usd BIGINT NOT NULL, 
	period VARCHAR(16) NOT NULL, 
	is_of_run BOOLEAN DEFAULT 0 NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "skyward_accounts" VALUES('team',30000000,'month',0);
CREATE TABLE skyward_alembic (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT skyward_alembic_pkc PRIMARY KEY (version_num)
);
INSERT INTO "skyward_alembic" VALUES('13');
CREATE TABLE skyward_attempts (
	id INTEGER NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	at_microseconds BIGINT NOT NULL, 
	provider VARCHAR(64) NOT NULL, 
	region VARCHAR(64) NOT NULL, 
	instance_type VARCHAR(255) NOT NULL, 
	is_spot BOOLEAN NOT NULL, 
	milliseconds BIGINT NOT NULL, 
	error VARCHAR(64) NOT NULL, 
	code VARCHAR(255) NOT NULL, 
	message TEXT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id)
);
CREATE TABLE skyward_balances (
	account VARCHAR(255) NOT NULL, 
	scope VARCHAR(300) NOT NULL, 
	committed_micro_usd BIGINT NOT NULL, 
	PRIMARY KEY (account, scope), 
	FOREIGN KEY(account) REFERENCES skyward_accounts (name)
);
INSERT INTO "skyward_balances" VALUES('team','2026-11',370000);
CREATE TABLE skyward_calls (
	pool_id VARCHAR(255) NOT NULL, 
	call_id VARCHAR(128) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	owner VARCHAR(500) NOT NULL, 
	generation BIGINT NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	started_microseconds BIGINT NOT NULL, 
	ended_microseconds BIGINT, 
	milliseconds BIGINT NOT NULL, 
	micro_usd BIGINT NOT NULL, 
	work_system VARCHAR(500) DEFAULT '' NOT NULL, 
	work_workflow VARCHAR(500) DEFAULT '' NOT NULL, 
	work_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_attempt VARCHAR(500) DEFAULT '' NOT NULL, 
	work_asset VARCHAR(500) DEFAULT '' NOT NULL, 
	work_partition VARCHAR(500) DEFAULT '' NOT NULL, 
	PRIMARY KEY (pool_id, call_id), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id)
);
CREATE TABLE skyward_clients (
	id VARCHAR(64) NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	owner_user VARCHAR(255) NOT NULL, 
	owner_host VARCHAR(255) NOT NULL, 
	owner_process VARCHAR(255) NOT NULL, 
	joined_microseconds BIGINT NOT NULL, 
	lease_expires_microseconds BIGINT NOT NULL, 
	left_microseconds BIGINT, 
	slot_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	calls BIGINT DEFAULT '0' NOT NULL, 
	busy_microseconds BIGINT, 
	topic VARCHAR(64) DEFAULT '' NOT NULL, 
	work_system VARCHAR(500) DEFAULT '' NOT NULL, 
	work_workflow VARCHAR(500) DEFAULT '' NOT NULL, 
	work_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_attempt VARCHAR(500) DEFAULT '' NOT NULL, 
	work_asset VARCHAR(500) DEFAULT '' NOT NULL, 
	work_partition VARCHAR(500) DEFAULT '' NOT NULL, 
	lease_boot VARCHAR(64) DEFAULT '' NOT NULL, 
	lease_ahead_microseconds BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (id)
);
CREATE TABLE skyward_meta (
	name VARCHAR(64) NOT NULL, 
	value VARCHAR(64) NOT NULL, 
	PRIMARY KEY (name)
);
INSERT INTO "skyward_meta" VALUES('version','13');
CREATE TABLE skyward_names (
	name VARCHAR(128) NOT NULL, 
	pool_id VARCHAR(255) DEFAULT '' NOT NULL, 
	terms_json TEXT DEFAULT '{}' NOT NULL, 
	state VARCHAR(16) DEFAULT '' NOT NULL, 
	steward VARCHAR(64) DEFAULT '' NOT NULL, 
	epoch BIGINT DEFAULT '0' NOT NULL, 
	keep_warm_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	warm_until_microseconds BIGINT, 
	warm_boot VARCHAR(64) DEFAULT '' NOT NULL, 
	warm_ahead_microseconds BIGINT DEFAULT '0' NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE skyward_pools (
	id VARCHAR(255) NOT NULL, 
	owner_user VARCHAR(255) NOT NULL, 
	owner_host VARCHAR(255) NOT NULL, 
	owner_process VARCHAR(255) NOT NULL, 
	provider_json TEXT NOT NULL, 
	spec_json TEXT NOT NULL, 
	account VARCHAR(255), 
	created_microseconds BIGINT NOT NULL, 
	lease_expires_microseconds BIGINT NOT NULL, 
	lives_by_lease BOOLEAN NOT NULL, 
	condemned_microseconds BIGINT, 
	ended_microseconds BIGINT, 
	provider_account VARCHAR(255) DEFAULT '' NOT NULL, 
	work_system VARCHAR(500) DEFAULT '' NOT NULL, 
	work_workflow VARCHAR(500) DEFAULT '' NOT NULL, 
	work_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_attempt VARCHAR(500) DEFAULT '' NOT NULL, 
	work_asset VARCHAR(500) DEFAULT '' NOT NULL, 
	work_partition VARCHAR(500) DEFAULT '' NOT NULL, 
	warm_since_microseconds BIGINT, 
	run_account VARCHAR(255), 
	lease_boot VARCHAR(64) DEFAULT '' NOT NULL, 
	lease_ahead_microseconds BIGINT DEFAULT '0' NOT NULL, 
	name VARCHAR(128) DEFAULT '' NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "skyward_pools" VALUES('p','ada','laptop','c0ffee-boot.4026531836.4711.1234','{"provider": "verda", "regions": ["FIN-01"]}','{}',NULL,1795262400000000,1795266000000000,0,NULL,NULL,'','','','','','','','','',NULL,NULL,'',0,'');
INSERT INTO "skyward_pools" VALUES('q','ada','laptop','c0ffee-boot.4026531836.4711.1234','{"name": "verda"}','{}',NULL,1795262400000000,1795266000000000,0,NULL,NULL,'','airflow','nightly','manual__2026-11-22T07:00:00+00:00','train','','1','','',NULL,NULL,'',0,'');
INSERT INTO "skyward_pools" VALUES('shared','ada','laptop','c0ffee-boot.4026531836.4711.1234','{"name": "verda"}','{}',NULL,1795262400000000,1795266000000000,0,NULL,NULL,'','dagster','job','r1','','','','','',NULL,NULL,'',0,'');
CREATE TABLE skyward_reservations (
	id INTEGER NOT NULL, 
	account VARCHAR(255) NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	scope VARCHAR(300) NOT NULL, 
	reserved_micro_usd BIGINT NOT NULL, 
	made_microseconds BIGINT NOT NULL, 
	settled_microseconds BIGINT, 
	spent_micro_usd BIGINT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(account) REFERENCES skyward_accounts (name), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id)
);
INSERT INTO "skyward_reservations" VALUES(1,'team','p','2026-11',370000,1795262400000000,NULL,NULL);
CREATE TABLE skyward_resources (
	id INTEGER NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	provider VARCHAR(64) NOT NULL, 
	region VARCHAR(64) NOT NULL, 
	name VARCHAR(255) NOT NULL, 
	token VARCHAR(255) NOT NULL, 
	tags_json TEXT NOT NULL, 
	price_micro_usd_per_hour BIGINT NOT NULL, 
	on_demand_micro_usd_per_hour BIGINT NOT NULL, 
	is_spot BOOLEAN NOT NULL, 
	increment_seconds BIGINT NOT NULL, 
	minimum_seconds BIGINT NOT NULL, 
	intended_microseconds BIGINT NOT NULL, 
	expires_microseconds BIGINT NOT NULL, 
	cloud_id VARCHAR(255), 
	bound_microseconds BIGINT, 
	end_asked_microseconds BIGINT, 
	gone_microseconds BIGINT, 
	evidence TEXT, 
	launching_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	bootstrapping_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	running_calls_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	idle_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	warm_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	lost_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	terminating_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	filled_bucket VARCHAR(32), 
	filled_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	minimum_micro_usd BIGINT DEFAULT '0' NOT NULL, 
	extras_json TEXT DEFAULT '[]' NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id), 
	UNIQUE (token)
);
INSERT INTO "skyward_resources" VALUES(1,'p','instance','verda','FIN-01','skyward-t1','t1','{"skyward-pool": "p", "skyward-rank": "0"}',0,0,0,1,0,1795262400000000,1795266000000000,NULL,NULL,NULL,NULL,NULL,0,0,0,0,0,0,0,NULL,0,0,'[]');
INSERT INTO "skyward_resources" VALUES(2,'q','instance','verda','FIN-01','skyward-q-0','q-0','{"skyward-pool": "q", "skyward-rank": "0"}',1000000,1000000,0,1,0,1795262400000000,1795266000000000,'q-i-2',1795262400000000,NULL,NULL,NULL,0,0,3600000,0,0,0,0,NULL,0,0,'[]');
INSERT INTO "skyward_resources" VALUES(3,'q','instance','verda','FIN-01','skyward-q-1','q-1','{"skyward-pool": "q", "skyward-rank": "0"}',1000000,1000000,0,1,0,1795262400000000,1795266000000000,'q-i-3',1795262400000000,NULL,NULL,NULL,0,0,3600000,0,0,0,0,NULL,0,0,'[]');
INSERT INTO "skyward_resources" VALUES(4,'shared','instance','verda','FIN-01','skyward-shared-0','shared-0','{"skyward-pool": "shared", "skyward-rank": "0"}',8000000,8000000,0,1,0,1795262400000000,1795266000000000,'shared-i-4',1795262400000000,NULL,NULL,NULL,0,0,3600000,0,0,0,0,NULL,0,0,'[]');
INSERT INTO "skyward_resources" VALUES(5,'shared','instance','verda','FIN-01','skyward-shared-1','shared-1','{"skyward-pool": "shared", "skyward-rank": "0"}',8000000,8000000,0,1,0,1795262400000000,1795266000000000,'shared-i-5',1795262400000000,NULL,NULL,NULL,0,0,3600000,0,0,0,0,NULL,0,0,'[]');
CREATE TABLE skyward_sealed_leases (
	pool_id VARCHAR(255) NOT NULL, 
	lease_json TEXT NOT NULL, 
	sealed TEXT NOT NULL, 
	updated_microseconds BIGINT NOT NULL, 
	PRIMARY KEY (pool_id), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id)
);
CREATE TABLE skyward_shares (
	id INTEGER NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	work_system VARCHAR(500) DEFAULT '' NOT NULL, 
	work_workflow VARCHAR(500) DEFAULT '' NOT NULL, 
	work_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_attempt VARCHAR(500) DEFAULT '' NOT NULL, 
	work_asset VARCHAR(500) DEFAULT '' NOT NULL, 
	work_partition VARCHAR(500) DEFAULT '' NOT NULL, 
	micro_usd BIGINT NOT NULL, 
	owner VARCHAR(511) DEFAULT '' NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(pool_id) REFERENCES skyward_pools (id)
);
INSERT INTO "skyward_shares" VALUES(1,'shared','dagster','job','r1','a','','','a','',5000001,'');
CREATE TABLE skyward_uses (
	id VARCHAR(64) NOT NULL, 
	pool_id VARCHAR(255) NOT NULL, 
	client_id VARCHAR(64) DEFAULT '' NOT NULL, 
	began_microseconds BIGINT NOT NULL, 
	ended_microseconds BIGINT, 
	slot_milliseconds BIGINT DEFAULT '0' NOT NULL, 
	micro_usd BIGINT DEFAULT '0' NOT NULL, 
	noted_microseconds BIGINT NOT NULL, 
	held_slots BIGINT DEFAULT '0' NOT NULL, 
	held_micro_usd_per_hour BIGINT DEFAULT '0' NOT NULL, 
	work_system VARCHAR(500) DEFAULT '' NOT NULL, 
	work_workflow VARCHAR(500) DEFAULT '' NOT NULL, 
	work_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task VARCHAR(500) DEFAULT '' NOT NULL, 
	work_task_run VARCHAR(500) DEFAULT '' NOT NULL, 
	work_attempt VARCHAR(500) DEFAULT '' NOT NULL, 
	work_asset VARCHAR(500) DEFAULT '' NOT NULL, 
	work_partition VARCHAR(500) DEFAULT '' NOT NULL, 
	PRIMARY KEY (id)
);
CREATE INDEX skyward_pools_by_run ON skyward_pools (work_run);
CREATE INDEX skyward_uses_by_run ON skyward_uses (work_run);
CREATE INDEX ix_skyward_uses_pool_id ON skyward_uses (pool_id);
CREATE INDEX ix_skyward_clients_pool_id ON skyward_clients (pool_id);
CREATE INDEX ix_skyward_resources_pool_id ON skyward_resources (pool_id);
CREATE INDEX ix_skyward_reservations_pool_id ON skyward_reservations (pool_id);
CREATE INDEX ix_skyward_reservations_account ON skyward_reservations (account);
CREATE INDEX ix_skyward_attempts_pool_id ON skyward_attempts (pool_id);
CREATE INDEX ix_skyward_attempts_at_microseconds ON skyward_attempts (at_microseconds);
CREATE INDEX ix_skyward_shares_pool_id ON skyward_shares (pool_id);
CREATE INDEX skyward_calls_by_run ON skyward_calls (work_run);
CREATE INDEX ix_skyward_calls_started_microseconds ON skyward_calls (started_microseconds);
CREATE INDEX skyward_resources_open ON skyward_resources (id) WHERE gone_microseconds IS NULL;
COMMIT;
